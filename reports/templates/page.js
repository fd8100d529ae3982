"use strict";
for (const box of document.querySelectorAll(".flips")) {
  const filter = box.querySelector(".filter");
  const flips = [...box.querySelectorAll(".flip")];
  const selects = [...filter.querySelectorAll("select")];
  const button = filter.querySelector("button");
  const search = filter.querySelector("input");
  const plain = (text) => text.toLowerCase().split(/\s+/).filter(Boolean).join(" ");
  // What a person reads in an entry, without the headings that all of them share.
  const textOf = (flip) => plain([...flip.querySelectorAll(".item, .letters b, .where, pre")].map((part) => part.textContent).join(" "));
  let texts;
  const update = () => {
    const words = plain(search.value);
    if (words) texts ??= flips.map(textOf);
    flips.forEach((flip, i) => {
      const other = selects.some((select) => select.value && select.value !== flip.dataset[select.dataset.by]);
      flip.hidden = other || (words && !texts[i].includes(words));
    });
    const shown = flips.filter((flip) => !flip.hidden).length;
    filter.querySelector("output").textContent = `${shown} of ${flips.length}`;
  };
  for (const select of selects) select.addEventListener("change", update);
  search.addEventListener("input", update);
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
// A link leads to a folded section: unfold it, and mark the section that is being read.
const unfold = () => {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
};
addEventListener("hashchange", unfold);
unfold();
const links = [...document.querySelectorAll(".contents a")];
for (const link of links) link.addEventListener("click", () => setTimeout(unfold));
const targets = links.map((link) => document.getElementById(link.hash.slice(1)));
const markCurrent = () => {
  const read = targets.findLastIndex((target) => target && target.getBoundingClientRect().top < 120);
  links.forEach((link, i) => (i === read ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
};
if (links.length) addEventListener("scroll", markCurrent, { passive: true });
