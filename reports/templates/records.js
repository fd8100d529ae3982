for (const box of document.querySelectorAll(".records")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const count = data.links.length, step = 100;
  const [body, output, more, rest] = ["tbody", "output", "[data-more]", "[data-rest]"].map((name) => box.querySelector(name));
  const search = box.querySelector("input");
  const selects = [...box.querySelectorAll("select")];
  const word = (column, row) => data.words[column][data.rows[column][row]];
  const last = data.columns.length - 1;
  let found = [], shown = 0;

  const link = (row) => {
    const [before, after] = data.around[data.links[row]];
    return after === null ? before : before + after ? before + encodeURIComponent(word(last, row)).replaceAll("%2F", "/") + after : "";
  };
  const cell = (column, row) => {
    const element = document.createElement("td");
    const text = word(column, row);
    element.dataset.label = data.columns[column];
    if (column === data.verdict && text) {
      const sign = document.createElement("span");
      sign.className = `status ${text}`;
      sign.textContent = text;
      element.append(sign);
    } else if (column === last) {
      const code = document.createElement("code");
      code.textContent = text;
      const to = link(row);
      if (to) {
        const anchor = document.createElement("a");
        anchor.href = to;
        anchor.rel = "noreferrer";
        anchor.append(code);
        element.append(anchor);
      } else element.append(code);
    } else element.textContent = text;
    return element;
  };
  const show = () => {
    const rows = found.slice(shown, shown + step).map((row) => {
      const line = document.createElement("tr");
      line.append(...data.columns.map((_, column) => cell(column, row)));
      return line;
    });
    body.append(...rows);
    shown += rows.length;
    more.hidden = shown >= found.length;
    output.textContent = `${shown.toLocaleString("en")} of ${found.length.toLocaleString("en")} shown, of ${count.toLocaleString("en")}`;
  };
  const update = () => {
    // A word is compared once for each column, not once for each row.
    const wanted = selects.filter((select) => select.value).map((select) => [data.rows[Number(select.dataset.column)], Number(select.value)]);
    const parts = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = parts.map((part) => data.words.map((words) => words.map((text) => text.toLowerCase().includes(part))));
    found = [];
    for (let row = 0; row < count; row++) {
      if (wanted.every(([rows, value]) => rows[row] === value) && hits.every((of) => of.some((words, column) => words[data.rows[column][row]]))) found.push(row);
    }
    body.replaceChildren();
    shown = 0;
    show();
  };
  for (const select of selects) {
    data.words[Number(select.dataset.column)].map((text, index) => [text, index]).sort((a, b) => (a[0] < b[0] ? -1 : 1)).forEach(([text, index]) => {
      const option = document.createElement("option");
      option.value = index;
      option.textContent = text || "(none)";
      select.append(option);
    });
    select.addEventListener("change", update);
  }
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 120);
  });
  more.addEventListener("click", show);
  box.querySelector("[data-reset]").addEventListener("click", () => {
    for (const field of [search, ...selects]) field.value = "";
    update();
  });
  for (const matrix of document.querySelectorAll(".matrix")) {
    matrix.addEventListener("click", (event) => {
      const at = event.target.closest("td");
      if (!at || !at.className) return;
      const names = [at.parentElement.cells[0].title, matrix.querySelector("thead tr").cells[at.cellIndex].title];
      names.forEach((name, column) => {
        const select = selects.find((each) => Number(each.dataset.column) === column);
        if (select) select.value = String(data.words[column].indexOf(name));
      });
      search.value = "";
      update();
      box.scrollIntoView({ block: "start" });
    });
    matrix.classList.add("leads");
  }
  rest.remove();
  box.querySelector(".filter").hidden = false;
  update();
}
