// The report: sections drawn from the data in the page, and what a reader chooses.

const DATA = JSON.parse(byId("data").textContent);
const BASE = { local: "Local", fedavg: "FedAvg" };
const state = { group: 0, on: new Map(), context: true, focus: 0, seed: null, client: null, base: null, sort: null, columns: false };
const group = () => DATA.groups[state.group];
const many = () => group().seeds.length > 1;

// Which methods are in colour. A method takes the first free look and keeps it while it is on.

const slotOf = (k) => state.on.get(k);
function turn(k, on) {
  if (!on) return state.on.delete(k);
  if (state.on.has(k)) return;
  const taken = new Set(state.on.values());
  let slot = 0;
  while (taken.has(slot)) slot++;
  state.on.set(k, slot);
}
function suggested() {
  const all = group().methods;
  if (all.length <= 8) return all.map((_, k) => k);
  const bases = all.map((m, k) => k).filter((k) => all[k].name in BASE);
  const best = all.map((m, k) => k).filter((k) => !bases.includes(k)).slice(0, 8 - bases.length);
  return [...best, ...bases].sort((a, b) => a - b);
}
function choose(which) {
  state.on.clear();
  for (const k of which) turn(k, true);
}

// Series of every method: those in colour, and the others in grey

function series(points, star) {
  return group()
    .methods.map((m, k) => ({ name: m.name, slot: slotOf(k), points: points(m), star: star?.(m) ?? undefined }))
    .filter((line) => line.slot !== undefined || state.context);
}
const over = (lines, k) => {
  const values = lines.map((line) => line[k]).filter((v) => v !== null && v !== undefined);
  return { y: mean(values), low: values.length ? least(values) : null, high: values.length ? greatest(values) : null };
};
const range = (m, p, exact) => (p.high > p.low ? `${exact(p.y)} (${exact(p.low)} to ${exact(p.high)})` : exact(p.y));

const share = { unit: 100, exact: (v) => `${percent(v)} %` };

function byRound(host, key, title, label, shape) {
  const lines = series(
    (m) => m.t.map((t, k) => { const p = over(m[key], k); return { x: t, ...p, label: p.y === null ? "–" : range(m, p, shape.exact) }; }),
    (m) => (m.after && mean(m.after[key]) !== null ? { x: m.t.at(-1), y: mean(m.after[key]), label: `${shape.exact(mean(m.after[key]))} adapted` } : null),
  );
  lineChart(host, {
    title, column: true, series: lines, summary: leaders(key),
    x: { label: "round", format: String, whole: true, heading: (t) => `Round ${t}` },
    y: { label, ...shape },
  });
}
function leaders(key) {
  const all = group().methods.map((m) => ({ name: m.name, end: mean(m.after?.[key] ?? m[key].map((line) => line.at(-1))) })).filter((m) => m.end !== null);
  all.sort((a, b) => (key === "loss" ? a.end - b.end : b.end - a.end));
  const told = all.slice(0, 3).map((m) => `${short(m.name, 40)} ${key === "loss" ? loss(m.end) : percent(m.end) + " %"}`);
  return `${plural(all.length, "method")}. At the end: ${told.join(", ")}${all.length > 3 ? ", then others" : ""}.`;
}
const roundTable = (key, title, exact) =>
  dataTable(title, ["method", ...group().methods[0].t.map((t) => `round ${t}`), "adapted"], () =>
    group().methods.map((m) => [m.name, ...group().methods[0].t.map((t) => { const k = m.t.indexOf(t); return k < 0 ? "–" : exact(over(m[key], k).y); }), m.after ? exact(mean(m.after[key])) : "–"]),
  );

// Cost: where each method ended, how it got there, and the front that nobody beats at a lower price

const COSTS = {
  bytes: { title: "Accuracy by bytes sent", label: "bytes up and down, all clients", format: size, total: (m) => m.row.bytes_up + m.row.bytes_down },
  flops: { title: "Accuracy by FLOPs", label: "FLOPs of training and adapting, all clients", format: count, total: (m) => m.row.flops + (m.adapt_flops ?? 0) },
};
function front(total) {
  const ends = group().methods.map((m) => [total(m), m.row.mean, m.name]).sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  const found = [];
  for (const end of ends) if (!found.length || end[1] > found.at(-1)[1]) found.push(end);
  return found;
}
function byCost(host, key) {
  const { title, label, format, total } = COSTS[key];
  const best = front(total);
  const points = (m) => {
    const way = m[key] ? m.t.map((_, k) => ({ x: m[key][k], y: over(m.accuracy, k).y })) : [];
    const last = { x: total(m), y: m.row.mean };
    if (!m.after) way[Math.max(0, way.length - 1)] = last;
    return way.map((p) => ({ ...p, label: `${percent(p.y)} %` }));
  };
  const adapted = (m) => (m.after ? { x: total(m), y: m.row.mean, label: `${percent(m.row.mean)} % adapted` } : null);
  const coloured = (m) => slotOf(group().methods.indexOf(m)) !== undefined;
  lineChart(host, {
    title, ends: true, front: best, summary: `On the front: ${best.map((p) => short(p[2], 40)).join(", ")}.`,
    series: series((m) => (coloured(m) ? points(m) : m.after ? [{ ...adapted(m) }] : points(m).slice(-1)), (m) => (coloured(m) ? adapted(m) : null)),
    x: { label, format: (v) => brief(format(v)), log: true, heading: (v) => format(v) },
    y: { label: "accuracy, mean over clients (%)", ...share },
  });
}

// Clients

const seedOf = (m) => (state.seed in m.clients ? state.seed : Object.keys(m.clients)[0]);
const known = (values) => values.filter((v) => v !== null);
function bySorted(host) {
  const sorts = (m) => Object.values(m.clients).map((values) => known(values).sort((a, b) => a - b));
  const lines = series((m) => {
    const all = sorts(m), shortest = least(all.map((a) => a.length));
    return Array.from({ length: shortest }, (_, k) => { const p = over(all, k); return { x: k + 1, ...p, label: range(m, p, share.exact) }; });
  });
  lineChart(host, {
    title: "Clients' accuracies, sorted", column: true, series: lines, summary: "Each method's clients from the worst to the best.",
    x: { label: "clients, worst first", format: String, whole: true, heading: (k) => `Client ${k} from below` },
    y: { label: "accuracy of each client (%)", ...share },
  });
}
function clientName(k) {
  const id = group().ids[k], names = group().partitions[state.seed]?.names;
  return names?.[id] ?? `client ${id}`;
}
function byGain(host) {
  const m = group().methods[state.focus], base = group().methods.find((b) => b.name === state.base);
  if (!base || base === m) return host.replaceChildren(h("p", { class: "note" }, base ? `${BASE[state.base]} is the method shown; choose another one.` : "There is no run of Local or FedAvg here to compare with. Add one: perfed compare --methods local,fedavg,…"));
  const seed = seedOf(m), own = m.clients[seed], other = base.clients[seed];
  if (!other) return host.replaceChildren(h("p", { class: "note" }, `${BASE[state.base]} was not run with seed ${seed}.`));
  const bars = own.map((v, k) => ({ k, gain: v === null || other[k] === null ? null : v - other[k], from: other[k], to: v })).filter((b) => b.gain !== null);
  bars.sort((a, b) => b.gain - a.gain);
  const better = bars.filter((b) => b.gain > 0).length, worse = bars.filter((b) => b.gain < 0).length;
  const wide = Math.max(260, host.clientWidth || 640), high = wide < 480 ? 240 : 280;
  const room = { left: 46, right: 14, top: 18, bottom: 30 };
  const y = axis(bars.map((b) => b.gain), high - room.bottom, room.top, { pad: 0.05, from0: 0, upTo: 0 });
  const step = (wide - room.left - room.right) / bars.length, gap = step > 6 ? Math.min(4, step * 0.2) : 0;
  const text = `${short(m.name, 40)} against ${BASE[state.base]}: ${better} of ${bars.length} clients gain, ${worse} lose.`;
  const image = s("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", class: "chart", "aria-label": text, "data-series": bars.length });
  for (const v of y.marks) {
    image.append(s("line", { x1: room.left, x2: wide - room.right, y1: y.at(v), y2: y.at(v), class: v === 0 ? "base" : "grid" }));
    image.append(s("text", { x: room.left - 8, y: y.at(v), dy: "0.34em", "text-anchor": "end" }, points(v, digits(y.marks, 100))));
  }
  bars.forEach((b, i) => {
    const top = Math.min(y.at(b.gain), y.at(0)), tall = Math.max(1.5, Math.abs(y.at(b.gain) - y.at(0)));
    image.append(s("rect", { x: room.left + i * step + gap / 2, y: b.gain ? top : y.at(0) - 0.75, width: Math.max(0.6, step - gap), height: tall, class: b.gain > 0 ? "gain" : b.gain < 0 ? "lose" : "same", rx: step > 8 ? 2 : 0 }));
  });
  image.append(s("text", { x: 4, y: 10, class: "title" }, "difference in points"));
  image.append(s("text", { x: wide - room.right, y: high - 8, "text-anchor": "end", class: "title" }, `clients, by gain`));
  const plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": "Gains by client: arrow keys move through the clients" }, image);
  let at = -1;
  const tell = (i, spoken) => {
    const b = bars[i], box = image.getBoundingClientRect();
    const words = `${percent(b.from, 1)} → ${percent(b.to, 1)} %`;
    tip.show(box.left + ((room.left + (i + 0.5) * step) / wide) * box.width, box.top + (y.at(Math.max(0, b.gain)) / high) * box.height, h("strong", {}, short(clientName(b.k), 60)), h("div", { class: "row" }, h("span", { class: "who" }, words), h("b", {}, points(b.gain))));
    if (spoken) say(`${short(clientName(b.k), 60)}: ${words}, ${points(b.gain)} points`);
  };
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const i = Math.floor((((event.clientX - box.left) / box.width) * wide - room.left) / step);
    if (i >= 0 && i < bars.length) tell(i, false);
  });
  image.addEventListener("pointerleave", () => tip.hide());
  plot.addEventListener("blur", () => tip.hide());
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    at = Math.min(bars.length - 1, Math.max(0, at + move));
    tell(at, true);
  });
  host.replaceChildren(h("p", { class: "lead" }, text), plot, dataTable(text, ["client", BASE[state.base] + " %", short(m.name, 40) + " %", "difference"], () => bars.map((b) => [clientName(b.k), percent(b.from), percent(b.to), points(b.gain, 2)])));
}

// The partition

function bubbles(host) {
  const found = group().partitions[state.seed];
  if (!found) return host.replaceChildren(h("p", { class: "note" }, "These runs were made before the division was kept with them."));
  const most = 120, rows = found.train.slice(0, most), classes = found.classes.length;
  const wide = Math.max(260, host.clientWidth || 640);
  const room = { left: Math.min(110, 16 + 6.6 * greatest(found.classes.map((c) => Math.min(14, [...c].length)))), right: 12, top: 10, bottom: 42 };
  const step = (wide - room.left - room.right) / rows.length;
  const line = classes > 24 ? Math.max(6, 400 / classes) : Math.min(26, Math.max(step, 15)), high = room.top + room.bottom + line * classes;
  const top = greatest(rows.flatMap((r) => r.filter((_, k) => k % 2)));
  const far = Math.max(2.2, 0.5 * Math.min(line, Math.max(step, 7)) * 0.95);
  const text = `${plural(found.clients, "client")}${found.clients > most ? `, the first ${most} shown` : ""}, ${plural(classes, "class", "classes")}. The area of a bubble is the number of training samples; the largest has ${top}.`;
  const image = s("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", class: "chart", "aria-label": `The division of the data. ${text}`, "data-series": rows.length });
  const every = Math.ceil(12 / line), each = Math.ceil(26 / step);
  found.classes.forEach((name, c) => {
    const y = room.top + (c + 0.5) * line;
    image.append(s("line", { x1: room.left, x2: wide - room.right, y1: y, y2: y, class: "grid" }));
    if (c % every === 0) image.append(s("text", { x: room.left - 8, y, dy: "0.34em", "text-anchor": "end" }, short(name, 14)));
  });
  rows.forEach((row, i) => {
    const x = room.left + (i + 0.5) * step;
    const marks = s("g", { class: i >= found.clients - found.unseen ? "unseen" : "seen" });
    for (let k = 0; k < row.length; k += 2) marks.append(s("circle", { cx: x.toFixed(1), cy: room.top + (row[k] + 0.5) * line, r: Math.max(1, far * Math.sqrt(row[k + 1] / top)).toFixed(1) }));
    image.append(marks);
    if (i % each === 0) image.append(s("text", { x, y: high - room.bottom + 16, "text-anchor": "middle" }, String(i)));
  });
  image.append(s("text", { x: wide - room.right, y: high - 6, "text-anchor": "end", class: "title" }, "client"));
  const cursor = s("line", { y1: room.top, y2: high - room.bottom, class: "column", visibility: "hidden" });
  image.append(cursor);
  const plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": "Who has what: arrow keys move through the clients" }, image);
  let at = -1;
  const tell = (i, x, y, spoken) => {
    const held = [];
    for (let k = 0; k < rows[i].length; k += 2) held.push([found.classes[rows[i][k]], rows[i][k + 1]]);
    held.sort((a, b) => b[1] - a[1]);
    const who = short(found.names?.[i] ?? `client ${i}`, 60), more = held.length > 12 ? [h("div", { class: "row" }, `and ${held.length - 12} more`)] : [];
    tip.show(x, y, h("strong", {}, who), ...held.slice(0, 12).map(([name, n]) => h("div", { class: "row" }, h("span", { class: "who" }, short(name, 28)), h("b", {}, String(n)))), ...more);
    if (spoken) say(`${who}${i >= found.clients - found.unseen ? ", not in training" : ""}: ${held.map(([name, n]) => `${short(name, 28)} ${n}`).join(", ") || "no training samples"}`);
  };
  const leave = () => (tip.hide(), cursor.setAttribute("visibility", "hidden"));
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const i = Math.floor((((event.clientX - box.left) / box.width) * wide - room.left) / step);
    if (i < 0 || i >= rows.length) return tip.hide();
    tell(i, event.clientX, event.clientY, false);
  });
  image.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Escape") return leave();
    if (to === undefined) return;
    event.preventDefault();
    at = Math.min(rows.length - 1, Math.max(0, to));
    const x = room.left + (at + 0.5) * step, box = image.getBoundingClientRect();
    cursor.setAttribute("x1", x), cursor.setAttribute("x2", x), cursor.setAttribute("visibility", "visible");
    tell(at, box.left + (x / wide) * box.width, box.top + box.height / 2, true);
  });
  const counts = (r, part) => found.classes.map((_, c) => { const k = found[part][r].findIndex((v, i) => i % 2 === 0 && v === c); return k < 0 ? 0 : found[part][r][k + 1]; });
  host.replaceChildren(h("p", { class: "lead" }, text), plot, dataTable("Training samples by client and class", ["client", ...found.classes.map((c) => short(c, 20)), "test samples"], () => rows.map((_, r) => [found.names?.[r] ?? r, ...counts(r, "train"), counts(r, "test").reduce((a, b) => a + b, 0)])));
}

// Confusion matrices: tables, so that they can be read without seeing them

function confusions(host) {
  const m = group().methods[state.focus], local = group().methods.find((b) => b.name === "local");
  const pair = local && local !== m ? [m, local] : [m];
  const first = Object.keys(m.clients)[0], key = String(group().ids[state.client]);
  const cells = pair.map((one) => one.confusion[key]);
  if (!cells[0]) return host.replaceChildren(h("p", { class: "note" }, "This client's confusion matrix was left out to keep the page small, or stayed at its site."));
  const names = group().partitions[first]?.classes;
  const used = [...new Set(cells.flatMap((flat) => (flat ?? []).filter((_, k) => k % 3 < 2)))].sort((a, b) => a - b);
  const tables = pair.map((one, which) => {
    const flat = cells[which];
    const title = which ? "Local" : one.name;
    if (!flat) return h("p", { class: "note" }, `${short(title)}: left out to keep the page small.`);
    const n = new Map();
    let total = 0, right = 0;
    for (let k = 0; k < flat.length; k += 3) {
      n.set(`${flat[k]}/${flat[k + 1]}`, flat[k + 2]);
      total += flat[k + 2];
      if (flat[k] === flat[k + 1]) right += flat[k + 2];
    }
    const body = used.map((i) => {
      const sum = used.reduce((a, j) => a + (n.get(`${i}/${j}`) ?? 0), 0);
      return h("tr", {}, h("th", { scope: "row" }, short(names?.[i] ?? i, 12)), used.map((j) => {
        const v = n.get(`${i}/${j}`) ?? 0;
        const cell = h("td", { class: (i === j ? "hit" : v ? "miss" : "") + (sum && v / sum > 0.55 ? " full" : "") }, v ? String(v) : h("span", { class: "zero" }, "0"));
        cell.style.setProperty("--v", sum ? v / sum : 0);
        return cell;
      }));
    });
    return h("div", { class: "matrix" }, h("h3", {}, short(title, 40)), h("p", { class: "note" }, `${right} of ${total} right, ${percent(right / total, 1)} %`),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Confusion matrix of ${short(title, 40)}` },
        h("table", { class: "confusion" }, h("caption", { class: "hidden" }, `Rows are true classes, columns predictions of ${short(title, 40)}`), h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "corner" }, "true \\ said"), used.map((j) => h("th", { scope: "col" }, short(names?.[j] ?? j, 12))))), h("tbody", {}, body))));
  });
  const note = local ? (local === m ? "Local is the method shown." : null) : "There is no run of Local here to compare with.";
  host.replaceChildren(h("div", { class: "pair" }, tables), note ? h("p", { class: "note" }, note) : "");
}

// What stays with a client, what travels, layer by layer

// A copy of what is private may be sent as well: then its bytes say so.
const keptShare = (m, stage, n) => stage[1][n] / m.layers.sizes[n];
const sentShare = (m, stage, n) => (stage[2][n] ? stage[2][n] / m.layers.sizes[n] : Math.min(1, stage[3][n] / (4 * m.layers.sizes[n])));

// Behind the layers: second models, variates and whatever else a client keeps, sends or receives.
const BREAK = 20;
const besidesOf = (m) => m.layers.besides ?? [];
const heldBesides = (stage, n) => { const [kept, up, down] = stage[5][n]; return kept && (up || down) ? "both" : kept ? "kept" : up ? "sent" : down ? "got" : null; };
const numbers = (n) => `${n.toLocaleString("en")} ${n === 1 ? "number" : "numbers"}`;

function strip(m, wide, line, gap, left, apart = BREAK) {
  const { names, stages } = m.layers, T = group().rounds, more = besidesOf(m);
  const top = (n) => n * (line + gap) + (n < names.length ? 0 : apart);
  const high = top(names.length + more.length - 1) + line + gap;
  const at = (t) => left + ((t - 1) / T) * (wide - left);
  const until = (k) => (k + 1 < stages.length ? stages[k + 1][0] : T + 1);
  const box = (k, from, to) => `M${at(stages[k][0]).toFixed(1)},${from.toFixed(1)}H${at(until(k)).toFixed(1)}V${to.toFixed(1)}H${at(stages[k][0]).toFixed(1)}Z`;
  const ground = (y) => s("rect", { x: left, y, width: wide - left, height: line, class: "idle" });
  const layers = names.map((name, n) => {
    const y = top(n);
    const area = (from, to) => stages.map((stage, k) => (to(stage) - from(stage) < 1e-6 ? "" : box(k, y + line * from(stage), y + line * to(stage)))).join("");
    const kept = (stage) => keptShare(m, stage, n), sent = (stage) => sentShare(m, stage, n);
    const layer = s("g", { "data-layer": name }, ground(y), s("path", { class: "kept", d: area(() => 0, kept) }), s("path", { class: "sent", d: area((g) => Math.max(kept(g), 1 - sent(g)), () => 1) }));
    if (stages.some((g) => kept(g) + sent(g) > 1.001)) layer.append(s("path", { class: "both", d: area((g) => Math.min(kept(g), 1 - sent(g)), kept) }));
    return layer;
  });
  const others = more.map(([name], n) => {
    const y = top(names.length + n);
    const areas = ["kept", "sent", "both", "got"].map((how) => [how, stages.map((stage, k) => (heldBesides(stage, n) === how ? box(k, y, y + line) : "")).join("")]);
    return s("g", { "data-besides": name }, ground(y), areas.filter(([, d]) => d).map(([how, d]) => s("path", { class: how, d })));
  });
  return { parts: [...layers, ...others], high, at, top };
}
const stageAt = (m, t) => m.layers.stages.findLast?.((g) => g[0] <= t) ?? m.layers.stages.filter((g) => g[0] <= t).at(-1);
function layersClosely(host) {
  const m = group().methods[state.focus];
  if (!m.layers) return host.replaceChildren(h("p", { class: "note" }, "This run was made before layers were recorded by round."));
  const { names, sizes, stages, other, kept } = m.layers, T = group().rounds, more = besidesOf(m);
  const all = [...names, ...more.map(([name]) => name)];
  const wide = Math.max(260, host.clientWidth || 640), left = Math.min(130, 14 + 7 * greatest(all.map((n) => Math.min(16, [...n].length))));
  const line = names.length > 16 ? 12 : 24, gap = names.length > 16 ? 3 : 7;
  const { parts, high, top } = strip(m, wide - 10, line, gap, left);
  const image = s("svg", { viewBox: `0 0 ${wide} ${high + 30}`, role: "img", class: "chart", "data-series": all.length, "aria-label": `What ${short(m.name, 40)} keeps and sends in each of ${names.length} layers${more.length ? `, and besides them: ${more.map(([n]) => short(n, 20)).join(", ")},` : ""} over ${T} rounds` }, parts);
  all.forEach((name, n) => image.append(s("text", { x: left - 8, y: top(n) + line / 2, dy: "0.34em", "text-anchor": "end" }, short(name, 16))));
  if (more.length) image.append(s("text", { x: left, y: top(names.length) - 6, class: "title" }, "besides its layers"));
  const axisX = (t) => left + ((t - 0.5) / T) * (wide - 10 - left);
  for (const t of thinned(ticks(1, Math.max(2, T), 8, true), axisX, 34)) image.append(s("text", { x: axisX(t), y: high + 14, "text-anchor": "middle" }, String(t)));
  image.append(s("text", { x: wide - 10, y: high + 28, "text-anchor": "end", class: "title" }, "round"));
  const facts = (n, g) => {
    if (n < names.length) return [["elements", count(sizes[n])], ["private", `${percent(keptShare(m, g, n), 1)} %`], ["sent", `${percent(sentShare(m, g, n), 1)} %`], ["up per client", size(g[3][n])], ["down per client", size(g[4][n])]];
    const [held, up, down, , bytesUp, bytesDown] = g[5][n - names.length];
    return [["kept", numbers(held)], ["sent", numbers(up)], ["received", numbers(down)], ["up per client", size(bytesUp)], ["down per client", size(bytesDown)]];
  };
  const plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `Layers of ${short(m.name, 40)}: left and right move through rounds, up and down through layers` }, image);
  let now = null;
  const tell = (n, t, x, y, spoken) => {
    const lines = facts(n, stageAt(m, t));
    tip.show(x, y, h("strong", {}, `${short(all[n], 40)}, round ${t}`), ...lines.map(([a, b]) => h("div", { class: "row" }, h("span", { class: "who" }, a), h("b", {}, b))));
    if (spoken) say(`${all[n]}, round ${t}: ${lines.map((two) => two.join(" ")).join(", ")}`);
  };
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * wide, py = ((event.clientY - box.top) / box.height) * (high + 30);
    const n = all.findIndex((_, k) => py >= top(k) && py < top(k) + line + gap), t = Math.floor(((px - left) / (wide - 10 - left)) * T) + 1;
    if (n < 0 || t < 1 || t > T) return tip.hide();
    tell(n, t, event.clientX, event.clientY, false);
  });
  image.addEventListener("pointerleave", () => tip.hide());
  plot.addEventListener("blur", () => tip.hide());
  plot.addEventListener("keydown", (event) => {
    const [dn, dt] = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
    if (dn === undefined) return;
    event.preventDefault();
    now = now ? [Math.min(all.length - 1, Math.max(0, now[0] + dn)), Math.min(T, Math.max(1, now[1] + dt))] : [0, 1];
    const box = image.getBoundingClientRect();
    tell(...now, box.left + (axisX(now[1]) / wide) * box.width, box.top + (top(now[0]) / (high + 30)) * box.height, true);
  });
  const first = stages[0], last = stages.at(-1);
  const up = (g) => g[3].reduce((a, b) => a + b, 0);
  const changes = stages.some((g) => String([g[1], g[2]]) !== String([first[1], first[2]]));
  const lead = `${m.title ? `${short(m.title, 60)} keeps ${m.keeps || "what its code says"} and sends ${m.sends || "the rest"}. ` : ""}A client sends ${size(up(first))} in round 1${changes ? ` and ${size(up(last))} in round ${T}` : " and in every round alike"}${kept > 64 ? `, and holds ${size(kept)} of its own between rounds` : ""}.`;
  const rounds = (k) => `${stages[k][0]} to ${k + 1 < stages.length ? stages[k + 1][0] - 1 : T}`;
  const rows = () => stages.flatMap((g, k) => [
    ...names.map((name, n) => [rounds(k), name, count(sizes[n]), `${percent(keptShare(m, g, n), 1)} %`, `${percent(sentShare(m, g, n), 1)} %`, size(g[3][n]), size(g[4][n])]),
    ...more.map(([name], n) => { const [held, sent, got, , bytesUp, bytesDown] = g[5][n]; return [rounds(k), `besides: ${name}`, count(greatest([held, sent, got])), held ? "100.0 %" : "0.0 %", sent ? "100.0 %" : "0.0 %", size(bytesUp), size(bytesDown)]; }),
  ]);
  const own = !more.length && other ? h("p", { class: "note" }, `Besides its layers the method sends ${size(last[3].at(-1))} and receives ${size(last[4].at(-1))} of its own per client and round.`) : "";
  host.replaceChildren(h("p", { class: "lead" }, lead), legend(more.some((_, n) => stages.some((g) => heldBesides(g, n) === "got"))), plot, own, besidesInWords(m), dataTable(`Layers of ${short(m.name, 40)} by round`, ["rounds", "layer", "elements", "private", "sent", "up per client", "down per client"], rows));
}
function besidesInWords(m) {
  const { names, stages } = m.layers, more = besidesOf(m);
  if (!more.length) return "";
  const words = more.map(([name, like], n) => {
    const [kept, up, down] = [0, 1, 2].map((way) => greatest(stages.map((g) => g[5][n][way])));
    const shape = like.length === names.length ? ", shaped like the whole network" : like.length ? `, shaped like ${short(like.join(", "), 80)}` : "";
    const what = [kept ? `kept besides, ${numbers(kept)}` : "", up ? `sent besides, ${numbers(up)}` : "", down ? `received besides, ${numbers(down)}` : ""].filter(Boolean).join("; ");
    return h("li", {}, h("b", {}, short(name, 40)), `: ${what}${shape}`);
  });
  return h("div", { class: "besides note" }, h("ul", {}, words), h("p", {}, "Per client and round. The bytes of a layer include those of such copies of it."));
}
const legend = (got) => h("ul", { class: "keys" }, [["kept", "private: stays with the client"], ["sent", "travels to the server"], ["both", "private, and a copy travels"], ...(got ? [["got", "comes from the server only"]] : []), ["idle", "neither: frozen or not sent"]].map(([key, text]) => h("li", {}, s("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" }, s("rect", { width: 14, height: 14, rx: 3, class: key })), text)));
function layersAtAGlance(host) {
  const cards = group().methods.map((m, k) => {
    if (!m.layers) return null;
    const { parts, high } = strip(m, 180, Math.max(3, Math.min(13, 60 / (m.layers.names.length + besidesOf(m).length))), 2, 0, 5);
    const per = (stage) => size(stage[3].reduce((a, b) => a + b, 0)), first = per(m.layers.stages[0]), last = per(m.layers.stages.at(-1));
    return h("button", { type: "button", class: "card", "aria-pressed": String(k === state.focus), onclick: () => focusOn(k, true) }, h("span", { class: "who" }, short(m.name, 26)), s("svg", { viewBox: `0 0 180 ${high}`, class: "strip", "aria-hidden": "true", preserveAspectRatio: "none" }, parts), h("span", { class: "note" }, first === last ? `${last} up per client and round` : `${first} up per client in round 1, ${last} at the end`));
  });
  host.replaceChildren(...cards.filter(Boolean));
}

// The leaderboard

const COLUMNS = [
  ["rank", (m) => m.rank, (m) => ranks(m), true],
  ["method", (m) => m.name, null, true],
  ["accuracy %", (m) => m.row.mean, (m) => `${percent(m.row.mean)}${m.row.spread === null ? "" : ` ± ${percent(m.row.spread)}`}`],
  ["std", (m) => m.row.std, (m) => percent(m.row.std), true],
  ["worst 10 %", (m) => m.row.worst10, (m) => percent(m.row.worst10)],
  ["vs Local", (m) => m.gains.local?.mean, (m) => gain(m, "local")],
  ["vs FedAvg", (m) => m.gains.fedavg?.mean, (m) => gain(m, "fedavg")],
  ["New", (m) => m.row.new, (m) => percent(m.row.new)],
  ["up", (m) => m.row.bytes_up, (m) => size(m.row.bytes_up), true],
  ["down", (m) => m.row.bytes_down, (m) => size(m.row.bytes_down), true],
  ["FLOPs", (m) => m.row.flops, (m) => count(m.row.flops), true],
  ["time", (m) => m.row.seconds, (m) => duration(m.row.seconds), true],
];
// The columns that a narrow screen shows until it is asked for all of them.
const MAJOR = new Set(["rank", "method", "accuracy %", "worst 10 %"]);
const minor = (k) => (MAJOR.has(COLUMNS[k][0]) ? "" : " minor");
const ranks = (m) => (new Set(m.places).size > 1 ? [String(m.rank), h("span", { class: "minor" }, ` (${least(m.places)}–${greatest(m.places)})`)] : String(m.rank));
function gain(m, base) {
  const g = m.gains[base];
  if (!g) return "–";
  if (m.name === base) return h("span", { class: "note" }, "itself");
  return h("span", { class: "gains" }, h("span", { class: "up" }, `▲${g.better}`), " ", h("span", { class: "down" }, `▼${g.worse}`), h("span", { class: "hidden" }, ` (${g.better} clients gain, ${g.worse} lose, ${points(g.mean)} points on average)`));
}
function bar(m) {
  const { mean: v, spread } = m.row;
  const image = s("svg", { viewBox: "0 0 100 12", class: "bar", preserveAspectRatio: "none", width: 64, height: 12, "aria-hidden": "true" }, s("rect", { width: 100, height: 12, rx: 2, class: "track" }), s("rect", { width: Math.max(0, 100 * v).toFixed(1), height: 12, rx: 2, class: "value" }));
  if (spread) image.append(s("path", { class: "whisker", d: `M${Math.max(0, 100 * (v - spread)).toFixed(1)},6H${Math.min(100, 100 * (v + spread)).toFixed(1)}` }));
  return image;
}
function leaderboard(host) {
  const all = group().methods;
  all.forEach((m) => (m.rank = 1 + all.filter((o) => o.row.mean > m.row.mean).length));
  const empty = (k) => all.every((m) => COLUMNS[k][1](m) === null || COLUMNS[k][1](m) === undefined);
  const shown = COLUMNS.map((_, k) => k).filter((k) => !empty(k));
  const [by, down] = state.sort ?? [0, false];
  const order = all.map((_, k) => k);
  if (state.sort) {
    const value = COLUMNS[by][1];
    order.sort((a, b) => { const [x, y] = [value(all[a]) ?? -Infinity, value(all[b]) ?? -Infinity]; return (x < y ? -1 : x > y ? 1 : a - b) * (down ? -1 : 1); });
  }
  const best = (k) => (COLUMNS[k][3] ? null : greatest(all.map((m) => COLUMNS[k][1](m) ?? -Infinity)));
  const tops = shown.map(best);
  const head = shown.map((k) => {
    const [name, , , low] = COLUMNS[k];
    const sorted = by === k ? (down ? "descending" : "ascending") : "none";
    const press = () => { state.sort = [k, by === k && state.sort ? !down : !low]; leaderboard(host); host.querySelector(`[data-column="${k}"]`).focus(); };
    return h("th", { scope: "col", "aria-sort": sorted, class: (k === 1 ? "who" : "") + minor(k) }, h("button", { type: "button", "data-column": k, onclick: press }, name, h("span", { class: "arrow", "aria-hidden": "true" }, sorted === "none" ? "" : down ? "▾" : "▴")));
  });
  const body = order.map((k) => {
    const m = all[k];
    return h("tr", { class: m.name in BASE ? "baseline" : "" }, shown.map((c, i) => {
      if (c === 1) return h("th", { scope: "row", class: "who" }, h("button", { type: "button", class: "link", title: short(m.name, 200), onclick: () => focusOn(k, true) }, short(m.name, 60)), m.row.net ? h("span", { class: "note" }, ` ${short(m.row.net, 24)}`) : null);
      const text = COLUMNS[c][2](m), top = tops[i] !== null && COLUMNS[c][1](m) === tops[i];
      return h("td", { class: (top ? "best" : "") + minor(c) }, c === 2 ? [bar(m), " "] : null, text);
    }));
  });
  const whole = h("button", { type: "button", class: "quick columns", "aria-pressed": String(state.columns), onclick: () => { state.columns = !state.columns; leaderboard(host); host.querySelector(".columns").focus(); } }, "All columns");
  host.replaceChildren(whole, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the methods" }, h("table", { class: state.columns ? "board full" : "board" }, h("caption", { class: "hidden" }, "Methods ranked by mean accuracy over clients"), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body))));
}

// The panel of methods

function panel() {
  const all = group().methods, box = byId("methods");
  const toggles = all.map((m, k) =>
    h("button", { type: "button", class: "method", "aria-pressed": String(state.on.has(k)), "data-method": k, title: short(m.name, 200), onclick: () => { turn(k, !state.on.has(k)); redraw(); box.querySelector(`[data-method="${k}"]`).focus(); }, onpointerenter: () => heat(m.name), onpointerleave: () => heat(null) }, swatch(slotOf(k)), h("span", { class: "who" }, short(m.name, 60)), h("span", { class: "score" }, percent(m.row.mean, 1))));
  const quick = (text, which) => h("button", { type: "button", class: "quick", onclick: () => { choose(which()); redraw(); } }, text);
  const grey = h("input", { type: "checkbox", checked: state.context, onchange: () => { state.context = grey.checked; redraw(); } });
  box.hidden = byId("glance-section").hidden = all.length < 2;
  const open = box.querySelector("details")?.open ?? matchMedia("(min-width: 1000px)").matches;
  box.replaceChildren(
    h("details", { open }, h("summary", {}, h("h2", {}, "Methods"), h("span", { class: "note" }, `${state.on.size} of ${all.length} shown`)),
      h("div", { class: "quicks" }, quick("Best", suggested), quick("All", () => all.map((_, k) => k)), quick("None", () => [])),
      h("div", { class: "toggles", role: "group", "aria-label": "Methods in colour" }, toggles),
      all.length > 1 ? h("label", { class: "check" }, grey, "the others in grey") : null));
}

// Putting it together

function focusOn(k, scroll) {
  state.focus = k;
  if (!state.on.has(k)) turn(k, true);
  redraw();
  if (scroll) byId("closely").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}
function chooseGroup(k) {
  state.group = Number(k);
  const all = group().methods;
  state.sort = null;
  state.seed = String(group().seeds[0]);
  state.client = 0;
  state.base = all.find((m) => m.name in BASE)?.name ?? null;
  if (all.some((m) => m.name === "local")) state.base = "local";
  const divides = (m) => m.layers?.stages.some((g) => g[1].some((v) => v) && g[2].some((v) => v));
  state.focus = Math.max(0, all.findIndex(divides), divides(all[0]) ? 0 : -1);
  choose(suggested());
  words();
  redraw();
}
function headline() {
  const all = group().methods, [first, second] = all, local = all.find((m) => m.name === "local");
  const says = [];
  if (all.length === 1) says.push(`${short(first.name, 60)} reaches ${percent(first.row.mean)} % on its clients' own test data, the worst tenth ${percent(first.row.worst10)} %.`);
  else says.push(`${short(first.name, 60)} leads with ${percent(first.row.mean)} %, ${short(second.name, 60)} follows with ${percent(second.row.mean)} %.`);
  if (local && all.length > 1) {
    const ahead = all.filter((m) => m.row.mean > local.row.mean).length;
    says.push(local === first ? "No method beats training alone." : `${ahead} of ${all.length - 1} methods beat training alone (${percent(local.row.mean)} %).`);
  }
  return says.join(" ");
}
function words() {
  const g = group(), config = Object.fromEntries(g.words);
  const names = g.methods.length === 1 ? short(g.methods[0].name, 60) : plural(g.methods.length, "method");
  byId("title").textContent = `${names} on ${short(config.data, 60)}`;
  byId("what").textContent = g.title;
  byId("headline").textContent = headline();
  const top = g.methods[0], tile = (value, label) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label));
  byId("tiles").replaceChildren(tile(`${percent(top.row.mean)} %`, `best mean accuracy, ${short(top.name, 30)}`), tile(`${percent(greatest(g.methods.map((m) => m.row.worst10 ?? 0)))} %`, "best worst tenth of the clients"), tile(String(g.ids.length), `clients that took part, ${g.rounds} rounds`), tile(many() ? String(g.seeds.length) : "1", many() ? "seeds; bands are their range" : "seed: no spread is known"));
  const notes = [];
  if (g.unfinished.length) notes.push(`Not finished and not in this page: ${g.unfinished.slice(0, 12).join("; ")}${g.unfinished.length > 12 ? ` and ${g.unfinished.length - 12} more` : ""}.`);
  if (g.divided) notes.push("With the same seed, not all methods saw the same division of the data: compare with care.");
  const uncounted = g.methods.filter((m) => m.after && m.adapt_flops === null).map((m) => short(m.name, 40));
  byId("uncounted").hidden = !uncounted.length;
  byId("uncounted").textContent = `The FLOPs of their final adaptation were not counted when these ran: ${uncounted.join(", ")}.`;
  byId("notes").replaceChildren(...notes.map((text) => h("p", { class: "warning", role: "note" }, text)));
  const faults = g.methods.flatMap((m) => m.faults.map((f) => [m.name, ...f]));
  byId("faults").hidden = !faults.length;
  byId("fault-rows").replaceChildren(...faults.slice(0, 200).map((f) => h("tr", {}, f.map((v) => h("td", {}, String(v))))));
  byId("configuration").replaceChildren(...g.words.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value))));
  byId("commands").replaceChildren(...(g.commands.length ? g.commands.map((text) => h("pre", { tabindex: "0", "aria-label": "Command" }, text)) : [h("p", { class: "note" }, `The ${g.given.join(" and the ")} of these runs came as objects from Python, so no command alone makes them again.`)]));
  const rows = g.methods.flatMap((m) => m.runs.map((r) => h("tr", {}, h("th", { scope: "row" }, short(m.name, 60)), h("td", {}, String(r.seed)), h("td", {}, h("code", {}, r.state)), h("td", {}, h("code", {}, r.partition.slice(0, 16))), h("td", {}, Object.entries(r.versions).map((v) => v.join(" ")).join(", ")))));
  byId("hash-rows").replaceChildren(...rows);
}
function selectors() {
  const g = group(), m = g.methods[state.focus];
  byId("focus").replaceChildren(choice("Method", g.methods.map((o, k) => [k, o.name]), state.focus, (k) => focusOn(Number(k), false)));
  const seeds = g.seeds.map((v) => [v, String(v)]);
  const seed = () => (many() ? choice("Seed", seeds, state.seed, (v) => { state.seed = v; redraw(); }) : "");
  const bases = g.methods.filter((o) => o.name in BASE).map((o) => [o.name, BASE[o.name]]);
  byId("gain-choices").replaceChildren(bases.length ? choice("Against", bases, state.base, (v) => { state.base = v; redraw(); }) : "", seed());
  byId("partition-choices").replaceChildren(seed());
  const first = Object.keys(m.clients)[0];
  byId("confusion-choices").replaceChildren(choice("Client", g.ids.map((id, k) => [k, `${g.partitions[first]?.names?.[id] ?? id}: ${percent(m.clients[first][k], 1)} %`]), state.client, (v) => { state.client = Number(v); redraw(); }), many() ? h("span", { class: "note" }, `seed ${first}`) : "");
  byId("closely-title").textContent = `${short(m.name, 60)}, closely`;
  byId("about").replaceChildren(h("p", {}, [m.title !== m.name ? `${short(m.title, 100)}. ` : "", m.cites ? `${m.cites}.` : ""].join("")), h("details", { class: "data" }, h("summary", {}, "Configuration of this method"), h("pre", { tabindex: "0", "aria-label": "Configuration" }, m.toml ?? Object.entries(m.hyper).map((v) => v.join(" = ")).join("\n"))));
}
const PARTS = {
  board: leaderboard,
  accuracy: (host) => byRound(host, "accuracy", "Accuracy by round", "accuracy, mean over clients (%)", share),
  loss: (host) => byRound(host, "loss", "Loss by round", "loss on test data", { unit: 1, exact: loss }),
  bytes: (host) => byCost(host, "bytes"),
  flops: (host) => byCost(host, "flops"),
  sorted: bySorted,
  bubbles,
  gains: byGain,
  confusions,
  layers: layersClosely,
  glance: layersAtAGlance,
};
function redraw() {
  tip.hide();
  hot = undefined;
  heat(null);
  panel();
  selectors();
  for (const [id, draw] of Object.entries(PARTS)) draw(byId(id));
}
function tables() {
  byId("accuracy").after(roundTable("accuracy", "Accuracy in per cent by round", (v) => percent(v)));
  byId("loss").after(roundTable("loss", "Loss by round", loss));
  for (const key of ["bytes", "flops"]) byId(key).after(dataTable(COSTS[key].title, ["method", "accuracy %", COSTS[key].label, "on the front"], () => group().methods.map((m) => [m.name, percent(m.row.mean), COSTS[key].format(COSTS[key].total(m)), front(COSTS[key].total).some((p) => p[2] === m.name) ? "yes" : "no"])));
  byId("sorted").after(dataTable("Accuracy of clients", ["method", "mean %", "std", "worst 10 %", "gain over Local", "lose", "gain over FedAvg", "lose"], () => group().methods.map((m) => [m.name, percent(m.row.mean), percent(m.row.std), percent(m.row.worst10), ...["local", "fedavg"].flatMap((b) => [m.gains[b]?.better ?? "–", m.gains[b]?.worse ?? "–"])])));
}

if (DATA.groups.length > 1) byId("settings").append(choice("Setting", DATA.groups.map((g, k) => [k, g.title]), 0, (k) => { chooseGroup(k); document.querySelectorAll("details.data").forEach((d) => d.closest("#about") || d.remove()); tables(); redraw(); }, 300));
tables();
chooseGroup(0);
addEventListener("beforeprint", () => byId("methods").querySelectorAll("details").forEach((d) => (d.open = true)));
let wide = innerWidth;
addEventListener("resize", () => { if (innerWidth !== wide) (wide = innerWidth), requestAnimationFrame(redraw); });
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
