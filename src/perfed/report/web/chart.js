// Charts of lines and points with axes, bands, hover and arrow keys. A chart is drawn anew from its description.

const MARKS = [
  (r) => `M${-r},0A${r},${r} 0 1 0 ${r},0A${r},${r} 0 1 0 ${-r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.25 * r}L${1.2 * r},${0.9 * r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0Z`,
  (r) => `M0,${1.25 * r}L${1.2 * r},${-0.9 * r}H${-1.2 * r}Z`,
  (r) => `M${-r},${-r / 3}H${-r / 3}V${-r}H${r / 3}V${-r / 3}H${r}V${r / 3}H${r / 3}V${r}H${-r / 3}V${r / 3}H${-r}Z`,
  (r) => `M0,${-1.3 * r}L${1.25 * r},${-0.4 * r}L${0.8 * r},${1.1 * r}H${-0.8 * r}L${-1.25 * r},${-0.4 * r}Z`,
  (r) => `M${-1.2 * r},0A${1.2 * r},${1.2 * r} 0 1 0 ${1.2 * r},0A${1.2 * r},${1.2 * r} 0 1 0 ${-1.2 * r},0ZM${-r / 2},0A${r / 2},${r / 2} 0 1 1 ${r / 2},0A${r / 2},${r / 2} 0 1 1 ${-r / 2},0Z`,
];
const STAR = "M0,-6.5L1.6,-2.2L6.2,-2L2.6,0.9L3.8,5.3L0,2.8L-3.8,5.3L-2.6,0.9L-6.2,-2L-1.6,-2.2Z";
const DASHES = [null, "7 4", "2 3.5", "9 3 2 3"];
const COLOURS = 8;
const look = (slot) => ({ hue: `c${slot % COLOURS}`, mark: MARKS[slot % COLOURS], dash: DASHES[Math.floor(slot / COLOURS) % DASHES.length] });

function swatch(slot) {
  const image = s("svg", { class: "swatch", viewBox: "0 0 30 14", width: 30, height: 14, "aria-hidden": "true" });
  if (slot === undefined) {
    image.append(s("line", { x1: 2, x2: 28, y1: 7, y2: 7, class: "context" }));
    return image;
  }
  const { hue, mark, dash } = look(slot);
  image.append(s("g", { class: hue }, s("line", { x1: 1, x2: 29, y1: 7, y2: 7, class: "line", "stroke-dasharray": dash }), s("path", { d: mark(4), transform: "translate(15 7)", class: "mark", "fill-rule": "evenodd" })));
  return image;
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function ticks(low, high, most, whole = false) {
  const raw = Math.max((high - low) / Math.max(1, most), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((k) => k * power).find((k) => k >= raw - 1e-12);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

// Positions on an axis. A logarithmic one has a place for zero, left of everything else.
function axis(values, from, to, { log = false, pad = 0, whole = false, from0 = null, upTo = null } = {}) {
  const known = values.filter((v) => v !== null && Number.isFinite(v));
  if (log) {
    const above = known.filter((v) => v > 0);
    const zero = known.some((v) => v <= 0) ? 44 : 0;
    let low = Math.log10(least(above)), high = Math.log10(greatest(above));
    if (!above.length) (low = 0), (high = 1);
    const margin = Math.max(0.08, 0.06 * (high - low));
    (low -= margin), (high += margin);
    const start = from + zero * Math.sign(to - from);
    const at = (v) => (v <= 0 ? from + 14 : start + ((Math.log10(v) - low) / (high - low)) * (to - start));
    const marks = [];
    const wide = Math.abs(to - start);
    for (let p = Math.floor(low); p <= high; p++)
      for (const k of high - low < 1 && wide > 250 ? [1, 2, 3, 5, 7] : high - low < 2 ? [1, 2, 5] : [1]) {
        const v = k * 10 ** p;
        if (Math.log10(v) >= low && Math.log10(v) <= high) marks.push(v);
      }
    return { at, marks: zero ? [0, ...marks] : marks, zero: zero > 0, start };
  }
  let low = known.length ? least(known) : 0, high = known.length ? greatest(known) : 1;
  if (from0 !== null) low = Math.min(low, from0);
  if (upTo !== null) high = Math.max(high, upTo);
  if (high - low < 1e-9) (low -= whole ? 0.5 : 0.01), (high += whole ? 0.5 : 0.01);
  const margin = pad * (high - low);
  (low -= margin), (high += margin);
  const span = Math.abs(to - from);
  const marks = ticks(low, high, Math.max(2, Math.floor(span / (whole ? 60 : 44))), whole);
  return { at: (v) => from + ((v - low) / (high - low)) * (to - from), marks, zero: false, low, high };
}

function thinned(marks, at, room) {
  const kept = [];
  for (const v of marks) if (!kept.length || Math.abs(at(v) - at(kept.at(-1))) >= room) kept.push(v);
  return kept;
}

// series: {name, slot (undefined: grey), points: [{x, y, low, high, label}], star: {x, y}}; front: [[x, y], ...]
// The digits after the point that tell neighbouring marks apart, each in `unit`s.
function digits(marks, unit) {
  const step = marks.length > 1 ? (marks[1] - marks[0]) * unit : 1;
  let found = 0;
  while (found < 6 && Math.abs(step * 10 ** found - Math.round(step * 10 ** found)) > 1e-6 * step * 10 ** found) found += 1;
  return found;
}

function lineChart(host, spec) {
  const wide = Math.max(260, host.clientWidth || 640), high = spec.height ?? (wide < 480 ? 270 : 320);
  const room = { left: 46, right: 14, top: 24, bottom: 44 };
  const shown = spec.series.filter((line) => line.points.some((p) => p.y !== null && p.x !== null));
  const all = shown.flatMap((line) => [...line.points, ...(line.star ? [line.star] : [])]);
  const x = axis(all.map((p) => p.x), room.left, wide - room.right, { pad: spec.x.log ? 0 : spec.bars ? 0.01 : 0.02, ...spec.x });
  const y = axis(all.flatMap((p) => [p.y, p.low ?? null, p.high ?? null]), high - room.bottom, room.top, { pad: 0.06, ...spec.y });
  const image = s("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${spec.title}. ${spec.summary ?? ""}`, class: "chart", "data-series": shown.length });
  const grid = s("g", { class: "axes", "aria-hidden": "true" });
  for (const v of y.marks) {
    grid.append(s("line", { x1: room.left, x2: wide - room.right, y1: y.at(v), y2: y.at(v), class: "grid" }));
    grid.append(s("text", { x: room.left - 8, y: y.at(v), dy: "0.34em", "text-anchor": "end" }, (spec.y.unit * v).toFixed(digits(y.marks, spec.y.unit))));
  }
  for (const v of thinned(x.marks, x.at, spec.x.log ? 52 : 30)) {
    grid.append(s("line", { x1: x.at(v), x2: x.at(v), y1: high - room.bottom, y2: high - room.bottom + 4, class: "tick" }));
    grid.append(s("text", { x: x.at(v), y: high - room.bottom + 18, "text-anchor": "middle" }, v === 0 && x.zero ? "0" : spec.x.format(v)));
  }
  if (x.zero) grid.append(s("line", { x1: x.start - 8, x2: x.start - 8, y1: room.top, y2: high - room.bottom, class: "break" }));
  grid.append(s("line", { x1: room.left, x2: wide - room.right, y1: high - room.bottom, y2: high - room.bottom, class: "base" }));
  grid.append(s("text", { x: wide - room.right, y: high - 6, "text-anchor": "end", class: "title" }, spec.x.label));
  image.append(grid);
  if (spec.front?.length > 1) {
    const [first, ...rest] = spec.front.map((p) => [x.at(p[0]), y.at(p[1])]);
    image.append(s("path", { class: "front", d: `M${first.join()}` + rest.map(([a, b]) => `H${a}V${b}`).join("") + `H${wide - room.right}` }));
  }
  const drawn = [];
  const order = [...shown].sort((a, b) => (a.slot === undefined ? 0 : 1) - (b.slot === undefined ? 0 : 1));
  for (const line of order) {
    const known = line.points.filter((p) => p.y !== null && p.x !== null);
    const spots = known.map((p) => ({ ...p, line, px: x.at(p.x), py: y.at(p.y) }));
    const grey = line.slot === undefined;
    const { hue, mark, dash } = grey ? { hue: "grey", mark: MARKS[0], dash: null } : look(line.slot);
    const group = s("g", { class: `series ${hue}`, "data-name": line.name });
    if (!grey && spots.length > 1 && known.some((p) => p.high > p.low))
      group.append(s("path", { class: "band", d: "M" + spots.map((p) => `${p.px},${y.at(p.high ?? p.y)}`).join("L") + "L" + [...spots].reverse().map((p) => `${p.px},${y.at(p.low ?? p.y)}`).join("L") + "Z" }));
    if (spots.length > 1) group.append(s("path", { class: "line", "stroke-dasharray": dash, d: "M" + spots.map((p) => `${p.px.toFixed(1)},${p.py.toFixed(1)}`).join("L") }));
    const step = Math.max(1, Math.ceil(spots.length / 10));
    const marked = spec.ends ? spots.slice(-1) : grey ? (spots.length > 1 ? [] : spots) : spots.filter((_, k) => (spots.length - 1 - k) % step === 0);
    for (const p of marked) group.append(s("path", { class: "mark", "fill-rule": "evenodd", d: mark(spec.ends ? (grey ? 3.2 : 5) : 3.4), transform: `translate(${p.px.toFixed(1)} ${p.py.toFixed(1)})` }));
    if (line.star) {
      const at = { ...line.star, line, px: x.at(line.star.x), py: y.at(line.star.y) };
      const from = spots.at(-1);
      if (from) group.append(s("line", { class: "jump", x1: from.px, y1: from.py, x2: at.px, y2: at.py }));
      group.append(s("path", { class: "mark", d: STAR, transform: `translate(${at.px} ${at.py})` }));
      spots.push(at);
    }
    image.append(group);
    drawn.push(...spots);
  }
  if (spec.ends) labels(image, drawn, wide, room);
  image.append(s("text", { x: 4, y: 10, class: "title" }, spec.y.label));
  const cursor = s("g", { class: "cursor", "aria-hidden": "true" });
  image.append(cursor);
  const plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${spec.title}: arrow keys move through the values` }, image);
  host.replaceChildren(plot);
  if (drawn.length) follow(plot, image, cursor, drawn, spec, { wide, high, room });
}

// Names beside the last points where there is room for them.
function labels(image, spots, wide, room) {
  const taken = [];
  const last = new Map();
  for (const p of spots) if (p.line.slot !== undefined) last.set(p.line.name, p);
  for (const p of spots.filter((q) => q.line.slot === undefined || last.get(q.line.name) === q)) taken.push([p.px - 5, p.py - 5, p.px + 5, p.py + 5, p.line.name]);
  for (const p of [...last.values()].sort((a, b) => b.y - a.y)) {
    const text = short(p.line.name, 16), long = 6.6 * [...text].length;
    for (const [dx, dy, anchor] of [[9, 4, "start"], [-9, 4, "end"], [0, -10, "middle"], [0, 18, "middle"], [9, -8, "start"], [-9, -8, "end"], [9, 15, "start"], [-9, 15, "end"]]) {
      const left = p.px + dx - (anchor === "end" ? long : anchor === "middle" ? long / 2 : 0);
      const box = [left, p.py + dy - 11, left + long, p.py + dy + 3, p.line.name];
      const clash = taken.some((b) => b[4] !== p.line.name && b[0] < box[2] && b[2] > box[0] && b[1] < box[3] && b[3] > box[1]);
      if (clash || box[0] < room.left || box[2] > wide - 2 || box[1] < 16) continue;
      taken.push([...box.slice(0, 4), ""]);
      image.append(s("text", { x: p.px + dx, y: p.py + dy, "text-anchor": anchor, class: `name ${look(p.line.slot).hue}`, "aria-hidden": "true" }, text));
      break;
    }
  }
}

function follow(plot, image, cursor, drawn, spec, { wide, high, room }) {
  const columns = [...new Set(drawn.map((p) => p.x))].sort((a, b) => a - b);
  const inOrder = [...drawn].sort((a, b) => a.px - b.px || b.py - a.py);
  let place = -1;
  const at = (near) => {
    const same = spec.column ? drawn.filter((p) => p.x === near.x && (p.line.slot !== undefined || p.line === near.line)) : [near];
    same.sort((a, b) => a.py - b.py);
    cursor.replaceChildren();
    if (spec.column) cursor.append(s("line", { x1: near.px, x2: near.px, y1: room.top, y2: high - room.bottom }));
    cursor.append(s("circle", { cx: near.px, cy: near.py, r: 6.5 }));
    return same;
  };
  const tell = (near, same, box) => {
    const heading = spec.column ? spec.x.heading(near.x) : near.line.name;
    const rows = same.slice(0, 14).map((p) =>
      h("div", { class: p === near ? "row near" : "row" }, swatch(p.line.slot), h("span", { class: "who" }, spec.column ? short(p.line.name, 28) : spec.x.heading(p.x)), h("b", {}, p.label ?? spec.y.exact(p.y))),
    );
    if (same.length > 14) rows.push(h("div", { class: "row" }, `and ${same.length - 14} more`));
    tip.show(box.left + (near.px / wide) * box.width, box.top + (near.py / high) * box.height, h("strong", {}, short(heading, 60)), ...rows);
  };
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * wide, py = ((event.clientY - box.top) / box.height) * high;
    let near = null, least = Infinity;
    for (const p of drawn) {
      const away = (p.px - px) ** 2 * (spec.column ? 25 : 1) + (p.py - py) ** 2 + (p.line.slot === undefined ? 60 : 0);
      if (away < least) (least = away), (near = p);
    }
    tell(near, at(near), box);
    heat(near.line.name);
  });
  const leave = () => (tip.hide(), cursor.replaceChildren(), heat(null));
  image.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const ends = { Home: 0, End: (spec.column ? columns : inOrder).length - 1 }[event.key];
    if (event.key === "Escape") return leave();
    if (step === undefined && ends === undefined) return;
    event.preventDefault();
    const list = spec.column ? columns : inOrder;
    place = ends ?? Math.min(list.length - 1, Math.max(0, place + step));
    const near = spec.column ? drawn.filter((p) => p.x === columns[place]).sort((a, b) => (a.line.slot ?? 99) - (b.line.slot ?? 99))[0] : inOrder[place];
    const same = at(near);
    tell(near, same, image.getBoundingClientRect());
    const lines = same.map((p) => `${short(p.line.name, 40)} ${p.label ?? spec.y.exact(p.y)}`);
    say(`${spec.x.heading(near.x)}: ${lines.join(", ")}`);
  });
}

// The series under the pointer stands out in every chart.
let hot = null;
function heat(name) {
  if (name === hot) return;
  hot = name;
  for (const group of document.querySelectorAll("g.series")) group.classList.toggle("hot", group.dataset.name === name);
  document.documentElement.classList.toggle("heated", name !== null);
}
