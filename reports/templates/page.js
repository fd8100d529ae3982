"use strict";
for (const box of document.querySelectorAll(".flips")) {
  const filter = box.querySelector(".filter");
  const flips = [...box.querySelectorAll(".flip")];
  const selects = [...filter.querySelectorAll("select")];
  const button = filter.querySelector("button");
  const update = () => {
    for (const flip of flips) {
      flip.hidden = selects.some((select) => select.value && select.value !== flip.dataset[select.dataset.by]);
    }
    const shown = flips.filter((flip) => !flip.hidden).length;
    filter.querySelector("output").textContent = `${shown} of ${flips.length}`;
  };
  for (const select of selects) select.addEventListener("change", update);
  let open = false;
  button.addEventListener("click", () => {
    open = !open;
    for (const flip of flips) flip.open = open && !flip.hidden;
    button.textContent = open ? "Close all" : "Open all";
  });
  filter.hidden = false;
  update();
}
for (const figure of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const code = figure.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  figure.querySelector("figcaption").append(button);
}
