// Elements, numbers in words, and what follows the pointer. Text only ever enters as text nodes.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// Numbers

const MINUS = "\u2212";
const signed = (text) => text.replace("-", MINUS);
const percent = (value, digits = 2) => (value === null || value === undefined ? "–" : (100 * value).toFixed(digits));
const points = (value, digits = 1) =>
  value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + signed((100 * value).toFixed(digits));
const scaled = (value, units, between) => {
  let k = 0;
  while (Math.abs(value) >= 999.5 && k < units.length - 1) (value /= 1000), k++;
  const digits = k === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${between}${units[k]}`.trim();
};
const size = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], "\u00a0");
const count = (value) => scaled(value, ["", "k", "M", "G", "T", "P", "E"], "\u00a0");
const brief = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
const loss = (value) => (value === null || value === undefined ? "–" : value.toPrecision(3));
const duration = (seconds) => {
  if (seconds < 100) return `${seconds.toFixed(1)}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes}\u00a0min` : `${Math.floor(minutes / 60)}\u00a0h ${minutes % 60}\u00a0min`;
};
const short = (text, most = 24) => {
  const letters = [...String(text)];
  return letters.length <= most ? letters.join("") : letters.slice(0, most - 1).join("") + "…";
};
const mean = (values) => {
  const known = values.filter((v) => v !== null && v !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
const plural = (n, one, many = one + "s") => `${n} ${n === 1 ? one : many}`;

// What follows the pointer, and what a screen reader is told when the keyboard moves

const tip = {
  box: null,
  show(x, y, ...content) {
    this.box ??= document.body.appendChild(h("div", { id: "tip", "aria-hidden": "true" }));
    this.box.replaceChildren(...content);
    this.box.hidden = false;
    const own = this.box.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const left = x + 16 + own.width > wide ? x - 16 - own.width : x + 16;
    const top = Math.min(Math.max(8, y - own.height / 2), innerHeight - own.height - 8);
    this.box.style.left = `${Math.max(8, Math.min(left, wide - own.width - 8))}px`;
    this.box.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};
const say = (text) => (byId("live").textContent = text);

// A table behind a chart, made when it is opened

function dataTable(caption, head, rows) {
  const details = h("details", { class: "data" }, h("summary", {}, "Data as a table"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const cells = (row) => row.map((text, k) => (k ? h("td", {}, String(text)) : h("th", { scope: "row" }, String(text))));
    const table = h(
      "table",
      {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, String(text))))),
      h("tbody", {}, rows().map((row) => h("tr", {}, cells(row)))),
    );
    details.append(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table));
  });
  return details;
}

function choice(label, options, value, change, most = 60) {
  const select = h("select", { onchange: () => change(select.value) });
  for (const [key, text] of options) select.append(h("option", { value: key, selected: String(key) === String(value) }, short(text, most)));
  return h("label", { class: "choice" }, h("span", {}, label), select);
}
