// Follows runs: asks once a second, changes what has changed.

const EVERY = 1000;
const SHOWN = 32;
const cards = new Map();
const looks = new Map();
let latest = "", missed = 0, off = new Set();

const WORDS = { running: "running", starting: "starting", waiting: "not started", stopped: "stopped", finished: "finished", unreadable: "cannot be read" };
const label = (run) => (run.seed === null || run.seed === undefined ? String(run.method) : `${run.method}, seed ${run.seed}`);

function lookOf(run) {
  if (!looks.has(run.id)) {
    const taken = new Set(looks.values());
    let slot = 0;
    while (taken.has(slot)) slot++;
    looks.set(run.id, slot);
  }
  return looks.get(run.id);
}

function card(run) {
  const made = {};
  made.name = h("h3", { class: "who" });
  made.status = h("span", { class: "status" });
  made.bar = h("progress", { max: "1", value: "0" });
  made.round = h("b", { class: "round" });
  made.of = h("span", { class: "of" });
  made.facts = h("p", { class: "note facts" });
  made.cure = h("p", { class: "note cure" });
  made.toggle = h("button", { type: "button", class: "quick", onclick: () => { off.has(run.id) ? off.delete(run.id) : off.add(run.id); latest = ""; show(made.all); } }, "in the charts");
  made.place = h("span", { class: "key" });
  made.box = h("article", { class: "run", "data-run": run.id }, h("div", { class: "line1" }, made.place, made.name, made.status), made.bar, h("div", { class: "line1" }, h("span", {}, "round ", made.round, made.of), made.toggle), made.facts, made.cure);
  return made;
}

function update(made, run, all) {
  made.all = all;
  const drawn = run.curve?.length && !off.has(run.id);
  made.place.replaceChildren(swatch(drawn ? lookOf(run) : undefined));
  made.name.textContent = short(label(run), 80);
  made.name.title = short(run.id, 200);
  made.status.textContent = WORDS[run.status];
  made.status.dataset.status = run.status;
  made.bar.max = Math.max(1, run.rounds ?? 1);
  made.bar.value = run.round;
  made.bar.setAttribute("aria-label", `Rounds of ${short(label(run), 80)}`);
  made.round.textContent = String(run.round);
  made.of.textContent = run.rounds ? ` of ${run.rounds}` : "";
  made.toggle.hidden = !run.curve?.length;
  made.toggle.setAttribute("aria-pressed", String(!off.has(run.id)));
  const facts = [];
  const last = run.curve?.at(-1);
  if (last) facts.push(`accuracy ${percent(last[1])} % after round ${last[0]}`);
  if (run.bytes) facts.push(`${size(run.bytes)} sent`);
  if (run.refused) facts.push(plural(run.refused, "update refused", "updates refused"));
  if (run.left !== null && run.left !== undefined) facts.push(`about ${duration(run.left)} left`);
  else if (run.seconds) facts.push(`${duration(run.seconds)} of work`);
  if (run.status === "running" && run.since > 20) facts.push(`last round ${duration(run.since)} ago`);
  made.facts.textContent = facts.join(", ");
  made.cure.textContent = { stopped: run.round >= (run.rounds ?? Infinity) ? `All rounds are there, the result is not. Make it with: ${run.resume}` : run.round ? `No process works on it. Everything up to round ${run.round} is kept. Continue with: ${run.resume}` : `No process works on it, and no round was finished. Begin again with: ${run.resume}`, unreadable: run.error }[run.status] ?? "";
  made.cure.hidden = !made.cure.textContent;
}

function show(state) {
  const runs = state.runs;
  const is = (status) => runs.filter((run) => run.status === status).length;
  const counts = ["running", "starting", "stopped", "waiting", "finished", "unreadable"].filter(is).map((status) => `${is(status)} ${WORDS[status]}`);
  byId("title").textContent = runs.length ? counts.join(", ") : "No run here yet";
  document.title = `${counts.join(", ") || "waiting"} – perfed watch`;
  byId("what").textContent = short(state.directory, 200);
  const busy = ["running", "starting", "stopped", "unreadable", "finished", "waiting"];
  const order = [...runs].sort((a, b) => busy.indexOf(a.status) - busy.indexOf(b.status));
  const hosts = order.map((run) => {
    if (!cards.has(run.id)) cards.set(run.id, card(run));
    update(cards.get(run.id), run, state);
    return cards.get(run.id).box;
  });
  for (const [id, made] of cards) if (!runs.some((run) => run.id === id)) (made.box.remove(), cards.delete(id), looks.delete(id));
  const host = byId("runs");
  hosts.forEach((box, k) => { if (host.children[k] !== box) host.insertBefore(box, host.children[k] ?? null); });
  charts(order);
  const faults = runs.flatMap((run) => (run.faults ?? []).map((f) => [short(label(run), 60), ...f])).slice(-40).reverse();
  byId("faults").hidden = !faults.length;
  byId("fault-rows").replaceChildren(...faults.map((f) => h("tr", {}, f.map((v) => h("td", {}, short(v, 300))))));
}

function charts(order) {
  const drawn = order.filter((run) => run.curve?.length && !off.has(run.id)).slice(0, SHOWN);
  byId("curves").hidden = !order.some((run) => run.curve?.length);
  if (byId("curves").hidden) return;
  const exact = (v) => `${percent(v)} %`, unit = 100;
  const lines = (points) => drawn.map((run) => ({ name: label(run), slot: lookOf(run), points: points(run) }));
  lineChart(byId("accuracy"), { title: "Accuracy by round", column: true, series: lines((run) => run.curve.map(([x, y]) => ({ x, y, label: exact(y) }))), summary: `${plural(drawn.length, "run")}.`, x: { label: "round", format: String, whole: true, heading: (t) => `Round ${t}` }, y: { label: "accuracy, mean over clients (%)", unit, exact } });
  lineChart(byId("sorted"), { title: "Clients' accuracies, sorted", column: true, series: lines((run) => run.clients.filter((v) => v !== null).sort((a, b) => a - b).map((y, k) => ({ x: k + 1, y, label: exact(y) }))), summary: "At the last evaluation of each run.", x: { label: "clients, worst first", format: String, whole: true, heading: (k) => `Client ${k} from below` }, y: { label: "accuracy at the last evaluation (%)", unit, exact } });
}

async function ask() {
  try {
    const answer = await fetch("state.json", { cache: "no-store", signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const text = await answer.text();
    missed = 0;
    byId("link").hidden = true;
    if (text !== latest) {
      const state = JSON.parse(text);
      show(state);
      latest = text;
    }
  } catch {
    missed++;
    byId("link").hidden = missed < 2;
    byId("link").textContent = "perfed watch does not answer. What is below is what was known last; this page goes on by itself when it is started again.";
  }
  setTimeout(ask, EVERY);
}
ask();
let wide = innerWidth;
addEventListener("resize", () => { if (innerWidth !== wide) (wide = innerWidth), (latest = ""); });
