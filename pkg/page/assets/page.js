// The status page. It asks /data.json again and again, and shows the answer. Names, versions and reasons come from nodes
// and callers: everything is inserted as text (textContent), and never as HTML.
"use strict";

const samples = 60; // that are kept of a node's round trip and throughput
const pauseMin = 5000; // milliseconds between two questions; more if answers take long
const patience = 30000; // milliseconds for an answer
const spare = 8; // rows above and below those that can be seen

const $ = (query) => document.querySelector(query);
const list = $("#list"), body = $("#list tbody");

let data = null; // the last answer
let nodes = []; // of the last answer, each with what derive adds
let byName = new Map();
let shown = []; // nodes that pass the filter and the search, sorted
let show = "all", words = [], sortBy = "state", descending = false;
let chosen = ""; // name of the chosen node
let fetched = 0, failed = ""; // when the last answer came; why the last question failed
const past = new Map(); // by name of the node: {trips, rates, bytes, at}

// --- Text ---

// plain replaces characters that are no text: they could turn the direction of a line or hide a part of it.
const plain = (v) => String(v ?? "").replace(/[\p{C}\u2028\u2029]/gu, "?");

// make makes an element. What is given as text stays text.
function make(tag, className, text, ...children) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  if (text !== undefined && text !== null) e.textContent = plain(text);
  e.append(...children);
  return e;
}

// put sets the text of an element, if it differs.
function put(e, text) {
  text = plain(text);
  if (e.textContent !== text) e.textContent = text;
}

// span says how long some seconds are.
function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.abs(seconds), sign = seconds < 0 ? "-" : "";
  if (s < 60) return sign + Math.floor(s) + " s";
  if (s < 3600) return sign + Math.floor(s / 60) + " min";
  if (s < 172800) return sign + Math.floor(s / 3600) + " h";
  return sign + Math.floor(s / 86400) + " d";
}

function size(n, unit) {
  if (!Number.isFinite(n)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; n >= 1000 && i < units.length - 1; i++) n /= 1000;
  return (i && n < 10 ? n.toFixed(1) : Math.round(n)) + " " + units[i] + unit;
}

function millis(seconds) {
  if (!seconds) return "–";
  const ms = seconds * 1000;
  return (ms < 10 ? ms.toFixed(1) : Math.round(ms)) + " ms";
}

const time = (text) => (text ? Date.parse(text) / 1000 : NaN);
const moment = (text) => (text ? new Date(text).toLocaleString() : "");
const ago = (text) => (text ? moment(text) + ", " + span(now() - time(text)) + " ago" : "never");

// now is the clock of the cloud, in seconds.
const now = () => (data ? time(data.nodes.time) + (Date.now() - fetched) / 1000 : Date.now() / 1000);

// --- Data ---

const rank = { missing: 0, flapping: 1, ending: 2, connected: 3 };

// derive adds to a node what the list shows and sorts by.
function derive(n, at) {
  const sessions = n.sessions || [];
  n.away = n.state !== "connected";
  n.ends = time(n.certificate_ends);
  const starts = time(n.certificate?.starts || n.certificate_issued_at);
  // An edge renews when a third of the life is left. If a sixth is left, renewals have failed.
  const soon = n.ends > starts ? (n.ends - starts) / 6 : 5 * 86400;
  n.ending = n.ends - at < soon;
  n.kind = n.away ? "missing" : n.flapping ? "flapping" : n.ending ? "ending" : "connected";
  n.conns = 0;
  let bytes = 0;
  const replicas = [];
  for (const s of sessions) {
    n.conns += s.conns;
    bytes += s.sent_bytes + s.received_bytes;
    replicas.push(s.replica);
  }
  n.replica = replicas.join(", ") || n.last_replica || "";
  n.since = n.away ? time(n.last_seen) : time(sessions[0]?.since);
  n.software = sessions[0]?.software || n.last_software || "";
  n.trip = sessions[0]?.round_trip_seconds || 0;
  note(n, sessions, bytes, at);
  n.hay = [n.name, n.kind, n.replica, n.software, n.last_end, n.last_remote, ...sessions.map((s) => s.remote)]
    .join("\n").toLowerCase();
}

// note adds a sample to the history of a node. A new session begins to count at 0.
function note(n, sessions, bytes, at) {
  const ids = sessions.map((s) => s.id).join();
  let h = past.get(n.name);
  if (!h) past.set(n.name, (h = { trips: [], rates: [], ids, bytes, at }));
  n.rate = NaN;
  if (h.ids === ids && at > h.at) n.rate = Math.max(0, bytes - h.bytes) / (at - h.at);
  else if (at === h.at) n.rate = h.rates.at(-1) ?? NaN;
  if (n.away) n.rate = NaN;
  if (at > h.at || !h.trips.length) {
    push(h.trips, n.away ? NaN : n.trip);
    push(h.rates, n.rate);
  }
  h.ids = ids, h.bytes = bytes, h.at = at;
  n.history = h;
}

function push(ring, value) {
  ring.push(value);
  if (ring.length > samples) ring.shift();
}

async function ask() {
  const started = performance.now();
  try {
    const answer = await fetch("data.json", { cache: "no-store", signal: AbortSignal.timeout(patience) });
    if (!answer.ok) throw new Error(await answer.text());
    take(await answer.json());
    failed = "";
  } catch (err) {
    failed = err.message;
  }
  tell();
  const wait = Math.max(pauseMin, 5 * (performance.now() - started));
  setTimeout(next, wait);
}

// next asks again, but not while nobody can see the page.
function next() {
  if (!document.hidden) ask();
  else document.addEventListener("visibilitychange", next, { once: true });
}

function take(answer) {
  data = answer;
  fetched = Date.now();
  const at = time(data.nodes.time);
  nodes = data.nodes.nodes || [];
  byName = new Map();
  for (const n of nodes) {
    derive(n, at);
    byName.set(n.name, n);
  }
  for (const name of past.keys()) if (!byName.has(name)) past.delete(name);
  choose();
  route();
}

// tell shows what concerns all views.
function tell() {
  const late = failed || (fetched && Date.now() - fetched > 60000);
  $("#fresh").classList.toggle("late", !!late);
  // The clock of the cloud, as for all other times on the page: the browser's may differ.
  const when = data ? "updated " + new Date(data.nodes.time).toLocaleTimeString() : "loading";
  put($("#fresh"), failed ? "No answer: " + failed : when);
  if (!data) return;
  const counts = { all: nodes.length, missing: 0, flapping: 0, ending: 0, connected: 0 };
  let conns = 0, rate = 0;
  for (const n of nodes) {
    counts.missing += n.away;
    counts.connected += !n.away;
    counts.flapping += !!n.flapping;
    counts.ending += n.ending;
    conns += n.conns;
    rate += n.rate || 0;
  }
  for (const b of document.querySelectorAll("#filters button")) {
    const what = b.dataset.show, n = counts[what];
    put(b.querySelector("b"), n);
    b.setAttribute("aria-pressed", what === show);
    b.classList.toggle("bad", what === "missing" && n > 0);
    b.classList.toggle("warn", (what === "flapping" || what === "ending") && n > 0);
    b.hidden = what === "ending" && !n && show !== what;
  }
  const all = data.replicas.length;
  const replicas = all + (all === 1 ? " replica" : " replicas");
  put($("#where"), [data.replicas[0].replica, replicas, conns + (conns === 1 ? " conn" : " conns"), size(rate, "/s")].join(" · "));
  put($("#told"), `${counts.missing} missing, ${counts.flapping} flapping, ${counts.connected} connected`);
  document.title = (counts.missing ? `(${counts.missing}) ` : "") + "tunnel " + data.replicas[0].replica;
  problems();
}

function problems() {
  const all = [];
  for (const r of data.replicas) {
    for (const c of r.checks || []) if (c.state !== "ok") all.push(`${r.replica}: ${c.name} ${c.state}: ${c.text || ""}`);
  }
  for (const why of data.incomplete || []) all.push("Incomplete: " + why);
  const ul = $("#problems");
  if (ul.textContent !== all.map(plain).join("")) ul.replaceChildren(...all.map((t) => make("li", "", t)));
  ul.hidden = !all.length;
  put($("#refused"), refusals().length || "");
}

const refusals = () => data.replicas.flatMap((r) => (r.refusals || []).map((e) => ({ ...e, replica: r.replica })))
  .sort((a, b) => (a.time < b.time ? 1 : a.time > b.time ? -1 : 0));

// --- The list of nodes ---

const keys = {
  state: (n) => rank[n.kind], name: (n) => n.name, since: (n) => -n.since, trip: (n) => n.trip, rate: (n) => n.rate,
  conns: (n) => n.conns, replica: (n) => n.replica, ends: (n) => n.ends, software: (n) => n.software,
};

// compare orders unknown values last, whatever the sign.
function compare(a, b, sign = 1) {
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return sign * (a < b ? -1 : a > b ? 1 : 0);
}

const passes = {
  all: () => true, missing: (n) => n.away, connected: (n) => !n.away,
  flapping: (n) => n.flapping, ending: (n) => n.ending,
};

// choose filters and sorts.
function choose() {
  const key = keys[sortBy], sign = descending ? -1 : 1;
  shown = nodes.filter((n) => passes[show](n) && words.every((w) => n.hay.includes(w)));
  shown.sort((a, b) => compare(key(a), key(b), sign) || compare(a.name, b.name));
  for (const th of document.querySelectorAll("#list th")) {
    if (th.dataset.by === sortBy) th.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  }
  $("#list table").setAttribute("aria-rowcount", shown.length + 1);
  const none = $("#empty");
  none.hidden = shown.length > 0 || !data;
  if (!nodes.length) put(none, "No node has connected yet.");
  else put(none, show === "missing" && !words.length ? "No node is missing." : "No node matches.");
  paint(true);
}

// rows are the table rows that exist, in order: those of shown[first], shown[first+1], …
let rows = [], first = 0;
const above = spacer(), below = spacer();
body.append(above, below);

function spacer() {
  const tr = make("tr", "space");
  tr.setAttribute("aria-hidden", "true");
  tr.append(document.createElement("td"));
  return tr;
}

function newRow() {
  const tr = make("tr", "node");
  tr.setAttribute("role", "row");
  const td = (className, ...children) => {
    const e = make("td", className, null, ...children);
    e.setAttribute("role", "cell");
    tr.append(e);
    return e;
  };
  const number = () => make("span", "number");
  tr.parts = {
    state: make("span", "state"), link: make("a"),
    trip: number(), rate: number(), trips: line(80, 18), rates: line(80, 18),
  };
  td("", tr.parts.state);
  td("", tr.parts.link);
  tr.parts.since = td("");
  td("", tr.parts.trip, tr.parts.trips);
  td("wide", tr.parts.rate, tr.parts.rates);
  tr.parts.conns = td("wide");
  tr.parts.replica = td("wide");
  tr.parts.ends = td("wider");
  tr.parts.software = td("wider");
  return tr;
}

const stateText = { missing: "✕ missing", flapping: "↯ flapping", ending: "● connected", connected: "● connected" };

function fill(tr, i, at) {
  const n = shown[i], p = tr.parts;
  tr.name = n.name;
  tr.setAttribute("aria-rowindex", i + 2);
  tr.classList.toggle("chosen", n.name === chosen);
  p.state.className = "state " + (n.kind === "ending" ? "connected" : n.kind);
  put(p.state, stateText[n.kind]);
  put(p.link, n.name);
  p.link.href = "#node/" + encodeURIComponent(n.name);
  const end = n.away && n.last_end ? ["last session ended: " + n.last_end] : [];
  p.link.title = [n.name, ...end].map(plain).join("\n");
  put(p.since, Number.isNaN(n.since) ? (n.away ? "never" : "–") : span(at - n.since));
  put(p.trip, n.away ? "–" : millis(n.trip));
  put(p.rate, n.away ? "–" : size(n.rate, "/s"));
  draw(p.trips, n.history.trips);
  draw(p.rates, n.history.rates);
  put(p.conns, n.conns);
  put(p.replica, n.replica || "–");
  put(p.ends, Number.isNaN(n.ends) ? "–" : n.ends < at ? "✕ ended " + span(at - n.ends) + " ago" : span(n.ends - at));
  p.ends.classList.toggle("warn", n.ending);
  put(p.software, n.software || "–");
}

const rowHeight = () => parseInt(getComputedStyle(document.documentElement).getPropertyValue("--row"), 10);

// paint makes the rows that can be seen, and no others. Rows that stay keep their element, so that focus stays.
// all: the nodes have changed, so that every row is filled again.
function paint(all) {
  const height = rowHeight(), at = now();
  const from = Math.max(0, Math.min(shown.length, Math.floor(list.scrollTop / height) - spare));
  const to = Math.min(shown.length, from + Math.ceil(list.clientHeight / height) + 2 * spare);
  const free = [];
  while (rows.length && first < from) free.push(rows.shift()), first++;
  while (rows.length && first + rows.length > to) free.push(rows.pop());
  if (!rows.length) first = from;
  const kept = all ? 0 : rows.length, keptFrom = first;
  while (first > from) {
    const tr = free.pop() || newRow();
    body.insertBefore(tr, rows[0] || below);
    rows.unshift(tr);
    first--;
  }
  while (first + rows.length < to) {
    const tr = free.pop() || newRow();
    body.insertBefore(tr, below);
    rows.push(tr);
  }
  for (const tr of free) tr.remove();
  for (let k = 0; k < rows.length; k++) {
    const i = first + k;
    if (i < keptFrom || i >= keptFrom + kept) fill(rows[k], i, at);
  }
  above.firstChild.style.height = first * height + "px";
  below.firstChild.style.height = (shown.length - first - rows.length) * height + "px";
}

let painting = false;
function paintSoon() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    paint(false);
  });
}

// pick chooses a node of the list, and shows it.
function pick(i) {
  if (!shown.length) return;
  i = Math.max(0, Math.min(shown.length - 1, i));
  chosen = shown[i].name;
  const height = rowHeight(), top = i * height, room = list.clientHeight - height; // the head covers one row
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + height > list.scrollTop + room) list.scrollTop = top + height - room;
  paint(true);
  rows[i - first]?.parts.link.focus({ preventScroll: true });
}

const chosenIndex = () => shown.findIndex((n) => n.name === chosen);

// --- Sparklines ---

const svg = "http://www.w3.org/2000/svg";

function line(width, height) {
  const e = document.createElementNS(svg, "svg");
  e.setAttribute("width", width);
  e.setAttribute("height", height);
  e.setAttribute("viewBox", `0 0 ${width} ${height}`);
  e.setAttribute("aria-hidden", "true"); // the number beside it says the newest value
  e.append(document.createElementNS(svg, "path"));
  e.box = [width, height];
  return e;
}

// draw draws values from 0 to the largest one; unknown ones are gaps.
function draw(e, values) {
  const [width, height] = e.box;
  let most = 0;
  for (const v of values) if (v > most) most = v;
  let d = "", pen = "M";
  values.forEach((v, i) => {
    if (Number.isNaN(v)) {
      pen = "M";
      return;
    }
    const x = (width * (samples - values.length + i)) / (samples - 1);
    d += `${pen}${x.toFixed(1)} ${(height - 1 - (most ? (v / most) * (height - 2) : 0)).toFixed(1)}`;
    pen = "L";
  });
  e.firstChild.setAttribute("d", d);
}

// --- The other views ---

// sheet makes a table. A cell is a text, or an element.
function sheet(label, heads, lines, long) {
  const table = make("table"), head = make("tr"), rowsOf = make("tbody");
  table.setAttribute("aria-label", label);
  for (const h of heads) {
    const th = make("th", "", h);
    th.scope = "col";
    head.append(th);
  }
  for (const cells of lines) {
    const tr = make("tr");
    cells.forEach((c, i) => {
      const td = make("td", i === long ? "long" : "");
      td.dataset.head = heads[i];
      if (c instanceof Node) td.append(c);
      else td.textContent = plain(c);
      tr.append(td);
    });
    rowsOf.append(tr);
  }
  table.append(make("thead", "", null, head), rowsOf);
  return make("div", "sheet", null, table);
}

function refusalSheet(all) {
  return sheet("Refusals", ["When", "Result", "What", "Node", "Caller", "Target", "Replica", "Reason"], all.map((e) => [
    moment(e.time), make("span", "bad", e.result), [e.event, e.method, e.path].filter(Boolean).join(" "),
    e.node ? nodeLink(e.node) : "", e.caller || e.remote || "", e.target || "", e.replica,
    (e.err || "") + (e.skipped ? ` (and ${e.skipped} more)` : ""),
  ]), 7);
}

function nodeLink(name) {
  const a = make("a", "", name);
  a.href = "#node/" + encodeURIComponent(name);
  return a;
}

function nodeView(name) {
  const n = byName.get(name), out = [];
  const back = make("a", "", "← all nodes");
  back.href = "#nodes";
  out.push(back, make("h2", "", name));
  if (!n) return [...out, make("p", "problem", "No replica knows this node.")];
  const why = n.last_end || "the reason is not known";
  out.push(make("p", "state " + (n.kind === "ending" ? "connected" : n.kind), stateText[n.kind]));
  if (n.away) {
    out.push(make("p", "problem", n.last_seen
      ? `Missing for ${span(now() - n.since)}. The last session ended: ${why}.`
      : "Kubernetes has this node, and no replica has seen it."));
  }
  if (n.flapping) {
    out.push(make("p", "problem",
      `Flapping: four of its sessions began within ten minutes. The last session that ended: ${why}.`));
  }
  if (n.ending) {
    const ends = n.ends < now() ? "ended" : "ends";
    out.push(make("p", "problem", `The certificate ${ends} ${moment(n.certificate_ends)}: its renewals have failed.`));
  }
  const charts = make("div", "charts");
  for (const [text, values] of [
    ["Round trip " + (n.away ? "–" : millis(n.trip)), n.history.trips],
    ["Throughput " + size(n.rate, "/s"), n.history.rates],
  ]) {
    const chart = line(320, 60);
    draw(chart, values);
    charts.append(make("div", "", text, chart));
  }
  out.push(charts, make("p", "faint", "The lines begin when this page was opened."));
  const facts = make("dl", "facts");
  const fact = (key, value) => value && facts.append(make("dt", "", key), make("dd", "", value));
  out.push(make("h3", "", "History"), facts);
  fact("Last seen", n.away ? ago(n.last_seen) : "now");
  fact("First seen", n.first_seen && ago(n.first_seen));
  fact("Sessions since then", n.sessions_total);
  fact("Last replica", n.last_replica);
  fact("Last address", n.last_remote);
  fact("Last version", n.last_software);
  fact("End of the last session", n.last_end);
  fact("Certificate ends", n.certificate_ends && moment(n.certificate_ends) + ", in " + span(n.ends - now()));
  fact("Newest certificate", n.certificate_serial && `${n.certificate_serial}, issued ${ago(n.certificate_issued_at)}`);
  fact("Certificates issued", n.certificates_issued);
  fact("In Kubernetes", n.kubernetes ? "yes" : "");
  const sessions = n.sessions || [];
  if (sessions.length) {
    out.push(make("h3", "", "Sessions"), sheet("Sessions",
      ["Replica", "Kind", "Since", "Address", "Round trip", "Conns", "Sent", "Received", "Version"],
      sessions.map((s) => [s.replica, s.kind, ago(s.since), s.remote || "", millis(s.round_trip_seconds), s.conns,
        size(s.sent_bytes, ""), size(s.received_bytes, ""), s.software || ""])));
  }
  const refused = refusals().filter((e) => e.node === name);
  if (refused.length) out.push(make("h3", "", "Last refusals"), refusalSheet(refused));
  return out;
}

function replicasView() {
  const held = new Map();
  for (const n of nodes) {
    for (const s of n.sessions || []) {
      const h = held.get(s.replica) || { nodes: 0, conns: 0 };
      h.nodes++;
      h.conns += s.conns;
      held.set(s.replica, h);
    }
  }
  const lines = data.replicas.map((r) => {
    const h = held.get(r.replica) || { nodes: 0, conns: 0 }, c = r.counts;
    held.delete(r.replica);
    const refused = Object.values(c.conns_refused_total || {}).reduce((a, b) => a + b, 0);
    const state = make("span", r.ready ? "" : "bad", r.ready ? "ready" : "✕ not ready");
    return [r.replica, state, r.software, ago(r.started), h.nodes, h.conns,
      size(c.sent_bytes_total, ""), size(c.received_bytes_total, ""), refused, c.joins_refused_total];
  });
  for (const [name, h] of held) {
    lines.push([name, make("span", "bad", "✕ no status"), "", "", h.nodes, h.conns, "", "", "", ""]);
  }
  const out = [make("h2", "", "Replicas"), sheet("Replicas", ["Replica", "State", "Version", "Started", "Nodes", "Conns",
    "Sent", "Received", "Conns refused", "Joins refused"], lines)];
  const links = data.replicas[0].replicas || [];
  if (links.length) {
    out.push(make("h3", "", "As this replica sees the others"), sheet("Other replicas",
      ["Address", "Joined", "Version", "Nodes", "State"], links.map((l) => [
        l.remote, ago(l.since), l.software || "", l.nodes, l.leaving ? "about to stop" : "joined",
      ])));
  }
  return out;
}

function refusalsView() {
  const all = refusals();
  const out = [make("h2", "", "Last refusals")];
  if (all.length) out.push(refusalSheet(all));
  else out.push(make("p", "", "No caller and no join was refused since the replicas started."));
  out.push(make("p", "faint", "Each replica keeps its last 100 refusals of front doors and joins until it stops."));
  return out;
}

// route shows the view that the address names.
let view = "";
function route() {
  const [what, ...rest] = location.hash.slice(1).split("/");
  const next = ["nodes", "node", "replicas", "refusals"].includes(what) ? what : "nodes";
  const moved = view !== location.hash;
  view = location.hash;
  for (const main of document.querySelectorAll("main")) main.hidden = main.id !== next;
  for (const a of document.querySelectorAll("nav a")) {
    if (a.hash === "#" + next || (next === "node" && a.hash === "#nodes")) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  if (!data) return;
  if (next === "nodes") {
    paint(true);
    if (moved && chosenIndex() >= 0) pick(chosenIndex());
    return;
  }
  const main = document.getElementById(next);
  const scrolled = main.scrollTop, busy = main.contains(document.activeElement) && document.activeElement !== main;
  if ((busy || String(getSelection())) && !moved) return; // somebody reads here: the next answer will do
  if (next === "node") {
    let name = rest.join("/");
    try {
      name = decodeURIComponent(name);
    } catch { /* it stays as it is */ }
    chosen = name;
    main.replaceChildren(...nodeView(name));
  } else main.replaceChildren(...(next === "replicas" ? replicasView() : refusalsView()));
  main.scrollTop = moved ? 0 : scrolled;
  if (moved) main.focus({ preventScroll: true });
}

// --- Events ---

list.addEventListener("scroll", paintSoon, { passive: true });
window.addEventListener("resize", paintSoon);
window.addEventListener("hashchange", route);
$("#filters").addEventListener("click", (e) => {
  const b = e.target.closest("button");
  if (!b) return;
  show = b.dataset.show;
  list.scrollTop = 0;
  choose();
  tell();
});
$("#search").addEventListener("input", (e) => {
  words = e.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  list.scrollTop = 0;
  choose();
});
$("#list thead").addEventListener("click", (e) => {
  const th = e.target.closest("th");
  if (!th) return;
  descending = sortBy === th.dataset.by && !descending;
  sortBy = th.dataset.by;
  choose();
});
body.addEventListener("click", (e) => {
  const tr = e.target.closest("tr.node");
  if (tr && !e.target.closest("a") && !String(getSelection())) location.hash = "#node/" + encodeURIComponent(tr.name);
});
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const search = $("#search"), inSearch = e.target === search, inList = !$("#nodes").hidden;
  if (e.key === "Escape") {
    if (!inList) location.hash = "#nodes";
    else if (inSearch || search.value) {
      search.value = "";
      words = [];
      choose();
      search.blur();
    } else {
      chosen = "";
      show = "all";
      choose();
      tell();
    }
    return;
  }
  if (!inList) return;
  if (e.key === "/" && !inSearch) {
    e.preventDefault();
    search.focus();
    return;
  }
  if (inSearch && !["ArrowDown", "Enter"].includes(e.key)) return;
  const page = Math.max(1, Math.floor(list.clientHeight / rowHeight()) - 2), at = chosenIndex();
  const to = {
    j: at + 1, ArrowDown: at + 1, k: at - 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page,
    Home: 0, End: shown.length,
  }[e.key];
  if (to !== undefined) {
    e.preventDefault();
    pick(inSearch ? 0 : to);
  } else if (e.key === "Enter" && (inSearch || e.target === document.body || e.target === list)) {
    const n = at >= 0 && !inSearch ? shown[at] : shown[0];
    if (n) location.hash = "#node/" + encodeURIComponent(n.name);
  }
});

route();
ask();
setInterval(tell, pauseMin); // so that an old answer looks old while a question waits
