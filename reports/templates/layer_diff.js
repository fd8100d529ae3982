{
  const source = document.getElementById("grids");
  const grids = source ? JSON.parse(source.textContent) : [];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // Blue below the bound, orange to red above it: distinguishable with the common forms of colour blindness. Larger is
  // darker on light paper and lighter on dark paper.
  const THEMES = {
    light: { paper: "#fbfaf8", ink: "#1b1e23", quiet: "#5a616c", rule: "#d3d1cc", sunken: "#f0eeea", within: ["#e9f0f7", "#b3cfe8", "#6ea6d8"], beyond: ["#f7b64a", "#dc5f22", "#8c1515"], unfinite: "#000000" },
    dark: { paper: "#15171a", ink: "#e6e5e1", quiet: "#a0a6b0", rule: "#3d4249", sunken: "#1d2024", within: ["#1b2836", "#27486b", "#3b74b0"], beyond: ["#b8701a", "#f08c3a", "#ffd08a"], unfinite: "#ffffff" },
  };
  const FONT = "Inter, system-ui, sans-serif";
  let theme = THEMES[dark.matches ? "dark" : "light"];

  const ratio = (value, bound) => value / (bound ?? 1);
  const isNumber = (value) => typeof value === "number";
  // As assay.harness.text.percent: an error has one form on the page.
  const percent = (value) => `${value >= 0.1 ? Math.round(100 * value) : Number((100 * value).toPrecision(2))} %`;
  const digits = (value) => (value >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4))));
  // A number in a cell or on the scale is short: 0.001 and 10,000 as they are, beyond that a power of ten.
  const power = (decade) => (Math.abs(decade) < 4 ? String(Number((10 ** decade).toPrecision(1))) : `10${[...String(decade)].map((sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]).join("")}`);
  const brief = (value) => (value > 0 && value < 1e-5 ? `${Number((100 * value).toPrecision(1)).toExponential().replace("e-", "e−")} %` : percent(value));

  // One scale for all maps, so that a colour means the same in each: multiples of the bound, where there is one.
  const bounds = grids.flatMap((grid) => grid.bounds.filter((bound) => bound !== null));
  const judged = bounds.length > 0;
  let least = Infinity, most = 0;
  for (const grid of grids) {
    grid.values.forEach((row, r) => {
      for (const value of row) {
        if (!isNumber(value) || value <= 0 || (judged && grid.bounds[r] === null)) continue;
        const x = ratio(value, grid.bounds[r]);
        if (x < least) least = x;
        if (x > most) most = x;
      }
    });
  }
  if (least === Infinity) [least, most] = [0.1, 1];
  const low = Math.max(Math.floor(Math.log10(least)), (judged ? 0 : Math.ceil(Math.log10(most))) - 4);
  const high = Math.max(Math.ceil(Math.log10(most)), low + 1);
  const [bottom, top] = judged ? [Math.min(low, -1), Math.max(high, 1)] : [low, high];

  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const ramp = (stops, t) => {
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
    const [a, b] = [channels(stops[i]), channels(stops[i + 1])];
    return `rgb(${a.map((v, k) => Math.round(v + (b[k] - v) * (at - i))).join(" ")})`;
  };
  const shade = (x) => {
    const decade = Math.log10(Math.max(x, 1e-30));
    if (!judged) return ramp(theme.within, (decade - bottom) / (top - bottom));
    return x > 1 ? ramp(theme.beyond, decade / top) : ramp(theme.within, 1 - decade / bottom);
  };

  const hatch = (context, x, y, width, height) => {
    context.fillStyle = theme.sunken;
    context.fillRect(x, y, width, height);
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = theme.rule;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let at = 0; at <= width + height; at += 6) {
      context.moveTo(x + at, y);
      context.lineTo(x + at - height, y + height);
    }
    context.stroke();
    context.restore();
  };

  const sized = (canvas, width, height) => {
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, width, height);
    return context;
  };

  const step = (size, room) => [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64].find((n) => n * size >= room) ?? 128;

  class HeatMap {
    constructor(figure) {
      this.small = figure.classList.contains("small");
      this.grid = grids[Number(figure.dataset.grid)];
      this.plot = figure.querySelector(".plot");
      this.canvas = figure.querySelector("canvas");
      this.cursor = figure.querySelector(".cursor");
      this.tip = figure.querySelector(".tip");
      this.at = null;
      figure.hidden = false;
      const select = figure.querySelector("select");
      select?.addEventListener("change", () => {
        this.grid = grids[Number(select.value)];
        this.leave();
        this.draw();
      });
      figure.querySelector("button")?.addEventListener("click", () => {
        this.canvas.focus();
        this.show(...this.grid.worst);
      });
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerdown", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && document.activeElement !== this.canvas && this.leave());
      this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.show(...(this.at ?? this.grid.worst)));
      this.canvas.addEventListener("blur", () => this.leave());
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
      this.draw();
    }

    draw() {
      const { rows, columns, values, bounds } = this.grid;
      this.width = this.plot.clientWidth;
      const [left, right, above, below] = [30, 34, 4, 38];
      const room = Math.max(this.width - left - right, columns.length);
      this.cellWidth = Math.min(room / columns.length, this.small ? 72 : 96);
      // Whole pixels keep the edges of cells sharp, where there are enough of them.
      if (this.cellWidth > 4) this.cellWidth = Math.floor(this.cellWidth);
      const [most, least, tall] = this.small ? [26, 3, 400] : [34, 5, 760];
      this.cellHeight = Math.max(Math.min(this.cellWidth, Math.floor(tall / rows.length), most), least);
      if (rows.length <= 8) this.cellHeight = this.small ? 26 : 38;
      const [w, h] = [this.cellWidth, this.cellHeight];
      const gap = Math.min(w, h) >= 10 ? 1 : 0;
      [this.left, this.above] = [left, above];
      const context = sized(this.canvas, left + w * columns.length + right, above + h * rows.length + below);
      context.translate(0, above);
      context.font = `11px ${FONT}`;
      // The hatching covers the whole map; observed cells are drawn over it.
      if (values.some((row) => row.includes(null))) hatch(context, left, 0, w * columns.length - gap, h * rows.length - gap);
      values.forEach((row, r) => {
        row.forEach((value, c) => {
          if (value === null) return;
          const [x, y] = [left + c * w, r * h];
          if (gap) {
            context.fillStyle = theme.paper;
            context.fillRect(x - gap, y - gap, w + gap, h + gap);
          }
          context.fillStyle = isNumber(value) ? shade(ratio(value, bounds[r] ?? (judged ? Math.max(...bounds) : null))) : theme.unfinite;
          const colour = context.fillStyle;
          context.fillRect(x, y, w - gap, h - gap);
          if (!isNumber(value) && Math.min(w, h) >= 6) this.cross(context, x, y, w - gap, h - gap);
          if (isNumber(value) && w >= 46 && h >= 18) this.number(context, colour, brief(value), w - gap - 4, x + (w - gap) / 2, y + (h - gap) / 2);
        });
      });
      this.outline(context, w, h, gap);
      context.fillStyle = theme.quiet;
      context.textBaseline = "middle";
      context.textAlign = "right";
      const down = step(h, 13), across = this.grid.column === "head" ? step(w, 26) : 1;
      for (let r = 0; r < rows.length; r += down) context.fillText(rows[r], left - 7, (r + 0.5) * h);
      context.textBaseline = "top";
      context.textAlign = "center";
      const under = h * rows.length + 12;
      for (let c = 0; c < columns.length; c += across) context.fillText(columns[c], left + (c + 0.5) * w, under, across * w);
      context.textAlign = "left";
      context.fillText(`layer ↓   ${{ head: "head", prefix: "cached prefix, in tokens", position: "position", batch: "place in the batch" }[this.grid.column]} →`, left, under + 15);
      this.pointers(context, w, h);
      const beyond = this.grid.beyond.flat().filter(Boolean).length;
      this.canvas.setAttribute("aria-label", `${this.grid.title}. ${rows.length} rows, ${columns.length} columns, ${beyond} cells out of bounds. Arrow keys read a cell.`);
      if (this.at) this.show(...this.at);
    }

    cross(context, x, y, w, h) {
      const [mx, my, d] = [x + w / 2, y + h / 2, Math.min(w, h) / 4];
      context.strokeStyle = theme.paper;
      context.lineWidth = Math.max(1, d / 3);
      context.beginPath();
      context.moveTo(mx - d, my - d); context.lineTo(mx + d, my + d);
      context.moveTo(mx + d, my - d); context.lineTo(mx - d, my + d);
      context.stroke();
    }

    number(context, colour, text, room, x, y) {
      if (context.measureText(text).width > room) return; // the cell says it when it is pointed at
      const [r, g, b] = channels(colour);
      context.fillStyle = 0.2126 * r + 0.7152 * g + 0.0722 * b > 120 ? "#14161a" : "#ffffff";
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(text, x, y);
    }

    // One outline around each region out of bounds, not around its single cells.
    outline(context, w, h, gap) {
      const { values, beyond } = this.grid;
      const out = (r, c) => beyond[r]?.[c];
      context.strokeStyle = theme.ink;
      context.lineWidth = Math.min(w, h) >= 10 ? 2 : 1;
      context.lineCap = "square";
      context.beginPath();
      values.forEach((row, r) => row.forEach((_, c) => {
        if (!out(r, c)) return;
        const [x, y] = [this.left + c * w - gap / 2, r * h - gap / 2];
        if (!out(r - 1, c)) { context.moveTo(x, y); context.lineTo(x + w, y); }
        if (!out(r + 1, c)) { context.moveTo(x, y + h); context.lineTo(x + w, y + h); }
        if (!out(r, c - 1)) { context.moveTo(x, y); context.lineTo(x, y + h); }
        if (!out(r, c + 1)) { context.moveTo(x + w, y); context.lineTo(x + w, y + h); }
      }));
      context.stroke();
    }

    // One cell of 16,384 is easily overlooked, so arrows at the edges point at its row and its column.
    pointers(context, w, h) {
      const { values, beyond, columns } = this.grid;
      const [right, bottom] = [this.left + w * columns.length + 2, h * values.length + 2];
      context.fillStyle = theme.beyond[1];
      context.textBaseline = "middle";
      let below = -Infinity;
      beyond.forEach((row, r) => {
        if (!row.some(Boolean)) return;
        const y = (r + 0.5) * h;
        this.triangle(context, right, y, 7, 4);
        if (values.length < 48 || y - below < 12) return;
        context.fillText(this.grid.rows[r], right + 10, y);
        below = y;
      });
      if (columns.length < 2) return;
      columns.forEach((_, c) => {
        if (beyond.some((row) => row[c])) this.triangle(context, this.left + (c + 0.5) * w, bottom, 4, 7);
      });
    }

    triangle(context, x, y, across, down) {
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + across, y + (across > down ? -down : down));
      context.lineTo(across > down ? x + across : x - across, y + down);
      context.fill();
    }

    point(event) {
      const r = Math.floor((event.offsetY - this.above) / this.cellHeight), c = Math.floor((event.offsetX - this.left) / this.cellWidth);
      if (this.grid.values[r]?.[c] === undefined) return this.leave();
      if (this.at?.[0] !== r || this.at?.[1] !== c) this.show(r, c);
    }

    key(event) {
      const { rows, columns } = this.grid;
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -columns.length], End: [0, columns.length] };
      if (event.key === "Escape") return this.leave();
      const move = moves[event.key];
      if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const [r, c] = this.at ?? this.grid.worst;
      this.show(Math.min(Math.max(r + move[0], 0), rows.length - 1), Math.min(Math.max(c + move[1], 0), columns.length - 1));
    }

    show(r, c) {
      const { rows, columns, values, bounds, beyond, column } = this.grid;
      const [value, bound, w, h] = [values[r][c], bounds[r], this.cellWidth, this.cellHeight];
      this.at = [r, c];
      const says = value === null ? "not observed" : isNumber(value) ? `relative L1 ${percent(value)}` : "not finite";
      let limits = bound === null ? "no bound" : `bound ${percent(bound)}`;
      if (isNumber(value) && bound !== null) limits += `, ${digits(Number((value / bound).toPrecision(2)))} × the bound`;
      if (beyond[r][c]) limits += ": out of bounds";
      this.tip.replaceChildren(...[`layer ${rows[r]}, ${{ head: "head", prefix: "cached prefix", position: "position", batch: "in the batch" }[column]} ${columns[c]}`, says, ...(value === null ? [] : [limits])].map((text, i) => {
        const line = document.createElement(i ? "span" : "b");
        line.textContent = text;
        return line;
      }));
      const [x, y] = [this.left + c * w, this.above + r * h];
      Object.assign(this.cursor.style, { left: `${x - 2}px`, top: `${y - 2}px`, width: `${w + 4}px`, height: `${h + 4}px` });
      this.cursor.hidden = this.tip.hidden = false;
      const beside = x + w + 10 + this.tip.offsetWidth <= this.width ? x + w + 10 : Math.max(x - 10 - this.tip.offsetWidth, 0);
      Object.assign(this.tip.style, { left: `${beside}px`, top: `${Math.max(y - 8, 0)}px` });
    }

    leave() {
      this.at = null;
      this.cursor.hidden = this.tip.hidden = true;
    }
  }

  const drawScale = (canvas) => {
    const [width, left, right] = [Math.min(canvas.closest(".key").clientWidth, 476), 32, 32];
    if (width <= left + right) return; // it is folded
    const context = sized(canvas, width, 50);
    context.translate(0, 4);
    const place = (decade) => left + ((decade - bottom) / (top - bottom)) * (width - left - right);
    for (let x = left; x < width - right; x++) {
      context.fillStyle = shade(10 ** (bottom + ((x + 0.5 - left) / (width - left - right)) * (top - bottom)));
      context.fillRect(x, 14, 1, 12);
    }
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.fillStyle = theme.quiet;
    context.textBaseline = "top";
    const label = (decade) => (judged ? `${power(decade)} ×` : brief(10 ** decade));
    const widest = Math.max(...Array.from({ length: top - bottom + 1 }, (_, i) => context.measureText(label(bottom + i)).width));
    const each = Math.ceil((widest + 12) / (place(1) - place(0))); // so many decades apart, labels do not overprint
    for (let decade = Math.ceil(bottom / each) * each; decade <= top; decade += each) {
      context.fillStyle = judged && decade === 0 ? theme.ink : theme.quiet;
      context.fillText(label(decade), place(decade), 30);
    }
    let says = "relative L1, log scale";
    if (judged) {
      const [a, b] = [Math.min(...bounds), Math.max(...bounds)].map(percent);
      const text = a === b ? `bound ${a}` : `bound ${a} to ${b}`;
      context.fillStyle = theme.ink;
      context.fillRect(place(0) - 1, 11, 2, 18);
      context.textBaseline = "bottom";
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.max(place(0), half), 10);
      says = `relative L1 as a multiple of its bound, log scale; ${text}`;
    }
    canvas.setAttribute("aria-label", says);
  };

  const maps = [...document.querySelectorAll(".heat")].map((figure) => new HeatMap(figure));
  const drawScales = () => {
    for (const key of document.querySelectorAll(".key")) {
      key.hidden = false;
      drawScale(key.querySelector("canvas"));
    }
  };
  const redraw = (name) => {
    theme = THEMES[name];
    drawScales();
    for (const map of maps) map.draw();
  };
  const current = () => (dark.matches ? "dark" : "light");
  redraw(current());
  dark.addEventListener("change", () => redraw(current()));
  const sizes = new ResizeObserver(drawScales); // a fold that is opened, too; maps watch their own size
  for (const key of document.querySelectorAll(".key")) sizes.observe(key.parentElement);
  addEventListener("beforeprint", () => redraw("light"));
  addEventListener("afterprint", () => redraw(current()));
}
