// The pane "Run": inserts the parts that the server renders whenever a run has news. It keeps no state that a reload
// would lose. curves.js draws charts, viewer.js enlarges previews.
/* global drawCharts, gather, items, plots, setAxis, view, viewer */

import { followRun, maySwitch, openConfig } from "./app.js";
import { chartData, haveSameLines, updateCharts } from "./charts.js";
import { api, ask, element, remember, sentences } from "./common.js";

const pane = document.querySelector(".run-view");
const problems = pane.querySelector(".run-problems");
const absence = pane.querySelector(".absence");
const place = (part) => pane.querySelector(`[data-part="${part}"]`);
// every: seconds after which a part is fetched even without news. While the page is open, a part also gets wanted (there
// is news), busy, at (when it came), pause (milliseconds until news may fetch it again) and query (what is shown of it).
export const parts = {
  list: { every: 10 }, queue: { every: 5 }, head: { every: 5 }, advice: { every: 60 }, planned: { every: 600 }, results: { every: 60 }, previews: { every: 60 },
  curves: { every: 60 }, log: { every: 60 },
};
const ofAll = { list: "/runs", queue: "/queue" }; // parts that do not belong to a run
export let run = new URLSearchParams(location.search).get("run");
let events = null;
let opened = new URLSearchParams(location.search).get("config"); // the config of Settings
let follows = false; // whether to show its run as soon as the list has it
let seen = Date.now(); // time of the server's last response
const PATIENCE = 60000; // milliseconds
const AT_THE_SERVER = "`simpletuner server` opens the page of all runs in this folder.";
const inRun = document.body.classList.contains("in-run"); // such a page ends with its run
let hasEnded = false;
const REFUSALS = [401, 403, 502, 503, 504]; // statuses with which a server or proxy refuses all requests

// ---- Updating HTML in place, without disturbing focus, typed text, playing clips and open details ----

function morph(node, fresh) {
  if (node.isEqualNode(fresh)) return;
  if (node.nodeName !== fresh.nodeName || node.nodeType !== Node.ELEMENT_NODE) {
    node.replaceWith(fresh);
    return;
  }
  for (const { name } of [...node.attributes]) if (!fresh.hasAttribute(name) && name !== "open") node.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (node.getAttribute(name) !== value && name !== "open") node.setAttribute(name, value);
  morphChildren(node, fresh);
}

export function morphChildren(node, fresh) {
  const olds = [...node.childNodes];
  const news = [...fresh.childNodes];
  olds.slice(news.length).forEach((each) => each.remove());
  news.forEach((each, index) => (olds[index] ? morph(olds[index], each) : node.append(each)));
}

export const parsed = (html) => new DOMParser().parseFromString(html, "text/html").body;

// ---- The parts ----

function showCurves(node, fresh) {
  const data = chartData(fresh);
  if (node.firstElementChild && haveSameLines(chartData(node), data)) {
    node.querySelector("#charts").textContent = JSON.stringify(data);
    updateCharts(data);
    return;
  }
  const overTime = plots.some((plot) => plot.overTime);
  if (node.querySelector("#curves") && fresh.querySelector("#curves")) replaceCharts(node, fresh);
  else node.replaceChildren(...fresh.childNodes);
  if (data.charts.length) drawCharts();
  if (overTime && data.hours.length > 1) setAxis("hours");
}

// The heading stays: its select has the focus while other runs are chosen.
function replaceCharts(node, fresh) {
  const head = node.querySelector(".section-head");
  while (head.nextSibling) head.nextSibling.remove();
  fresh.querySelector(".section-head").remove();
  head.after(...fresh.querySelector("#curves").childNodes);
}

function showPreviews(node, fresh) {
  const shown = items[view.index]?.source;
  morphChildren(node, fresh);
  gather();
  if (viewer.open) view.index = Math.max(0, items.findIndex((item) => item.source === shown));
  node.dispatchEvent(new Event("shown", { bubbles: true }));
}

function showLog(node, fresh) {
  const box = node.querySelector(".console");
  const follows = !box || box.scrollTop + box.clientHeight > box.scrollHeight - 30;
  morphChildren(node, fresh);
  const now = node.querySelector(".console");
  if (follows && now) now.scrollTop = now.scrollHeight;
}

// A waiting job cannot be queued again.
function tellWaiting() {
  const waits = place("queue").querySelector(`li[data-command=train]:has(.waiting) > a[data-run="${CSS.escape(run ?? "")}"]`);
  for (const button of place("head").querySelectorAll("[data-press=queue], [name=queue]")) {
    button.disabled = Boolean(waits);
    button.textContent = waits ? "In the queue" : "Add to queue";
  }
}

// The list may be older than the head's state, and what follows from the state, too.
function showHead(node, fresh) {
  morphChildren(node, fresh);
  tellWaiting();
  arrangeParts();
  const listed = place("list").querySelector(`[data-run="${run}"] .state`);
  const now = node.querySelector(".state"); // none if the part cannot be shown
  if (listed && now && listed.className !== now.className) want("list", "advice", "planned", "results", "previews", "log");
}

// First what one looks for: the previews, or the result of a run that is finished.
function arrangeParts() {
  const first = place("head").querySelector("[data-first]")?.dataset.first;
  const second = { results: "previews", previews: "results" }[first];
  if (second && place(first).nextElementSibling !== place(second)) moveAbove(place(first), place(second));
  parts.head.every = place("head").querySelector("[data-active]") ? 2 : 5; // the sentence counts seconds
}

// Moves the part without focus, which would lose it.
function moveAbove(first, second) {
  if (second.contains(document.activeElement)) second.before(first);
  else first.after(second);
}

// Renders of a job are part of the results.
function showQueue(node, fresh) {
  if (node.innerHTML !== fresh.innerHTML) want("results");
  morphChildren(node, fresh);
  tellWaiting();
  parts.queue.every = node.querySelector(".waiting, .running") ? 1 : 5;
}

const show = {
  list: morphChildren, queue: showQueue, head: showHead, advice: morphChildren, planned: morphChildren, results: showPreviews, curves: showCurves,
  previews: showPreviews, log: showLog,
};
const put = (name, html) => show[name](place(name), parsed(html));

// The server says in place of a part why it cannot be drawn; this is for an answer without a part.
const failure = (status) => `<p class="bad" role="alert">This part cannot be shown: the server answers ${status}.</p>`;

// The last event of a run's page contains its final state; after it, no requests are made.
function end({ data }) {
  hasEnded = true;
  events.close();
  for (const [name, html] of Object.entries(JSON.parse(data))) put(name, html);
  setLost("");
  place("head").inert = true;
  absence.textContent = `The run has ended, and its page with it. ${AT_THE_SERVER}`;
  absence.classList.add("ended");
  absence.hidden = false;
}

// While the server is unreachable, buttons are disabled, and a notice shows the age of the state.
function setLost(reason) {
  if (reason && !pane.classList.contains("lost")) {
    const time = new Date(seen).toLocaleTimeString("en-GB");
    const then = inRun ? `The run has probably ended. ${AT_THE_SERVER}` : "Runs go on without the page.";
    absence.textContent = `${reason} This was the state at ${time}. ${then}`;
  }
  if (!reason && pane.classList.contains("lost")) problems.hidden = true; // pressed while the server was unreachable
  absence.hidden = !reason;
  pane.classList.toggle("lost", Boolean(reason));
  place("head").inert = Boolean(reason);
  if (!reason) seen = Date.now();
}

const pathOf = (name) => ofAll[name] ?? `/runs/${encodeURIComponent(run)}/${name}?${parts[name].query ?? ""}`;

// Fetches a part; slow parts are fetched less often. An answer is dropped if another run, step or page was chosen since.
async function refresh(name) {
  const part = parts[name];
  const isHidden = document.hidden || pane.closest("[hidden]");
  if (hasEnded || isHidden || part.busy || (!(name in ofAll) && !run)) return;
  const asked = run;
  const path = pathOf(name);
  part.busy = true;
  part.wanted = false;
  const begun = performance.now();
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE) });
    const isLost = REFUSALS.includes(answer.status) || answer.status === 404; // a run that is gone leaves the list, too
    const html = answer.ok ? await answer.text() : failure(answer.status);
    if (hasEnded) return;
    if (!isLost && path === pathOf(name)) put(name, html);
    setLost(REFUSALS.includes(answer.status) ? `The server answers "${answer.status} ${answer.statusText}".` : "");
    if (events?.readyState === EventSource.CLOSED) listen();
  } catch {
    if (!hasEnded) setLost("The server does not answer."); // retried in the next round
  } finally {
    part.busy = false;
    const now = performance.now();
    part.at = path === pathOf(name) ? now : undefined; // what is chosen now is fetched at once
    part.pause = Math.max(1000, 10 * (now - begun));
  }
  if (name !== "list" || hasEnded) return;
  if (asked === run) chooseFirst();
  else want("list"); // this one may lack a run that was started since
}

const linkOfConfig = (config) => (config ? place("list").querySelector(`a[data-config="${CSS.escape(config)}"]`) : null);
const linkOfRun = (id) => place("list").querySelector(`a[data-run="${CSS.escape(id ?? "")}"]`);

function chooseFirst() {
  const links = [...place("list").querySelectorAll("a[data-run]")];
  const followed = follows && linkOfConfig(opened);
  if (followed) choose(followed.dataset.run);
  else if (!links.some((link) => link.dataset.run === run)) {
    const lost = run && (place("head").querySelector("h1")?.textContent ?? run);
    const first = linkOfConfig(opened) ?? links.find((link) => "active" in link.dataset) ?? links[0];
    run = null;
    if (first) choose(first.dataset.run);
    else place("head").replaceChildren(element("h1", { textContent: "No runs yet" }));
    if (lost) tellProblems([`${lost} is no longer there.${first ? " This is another run." : ""}`]);
  }
  for (const link of links) link.setAttribute("aria-current", String(link.dataset.run === run));
}

// Nothing of another run is shown while the parts of this one are fetched.
function forgetParts() {
  for (const [name, part] of Object.entries(parts)) {
    Object.assign(part, { query: "", at: undefined }); // fetched at once
    if (!(name in ofAll)) place(name).replaceChildren();
  }
}

export function choose(id) {
  if (run !== id) forgetParts();
  run = id;
  follows = false;
  remember("run", id);
  problems.hidden = true;
  for (const link of place("list").querySelectorAll("a[data-run]")) link.setAttribute("aria-current", String(link.dataset.run === id));
  listen();
  followRun(linkOfRun(id)?.dataset.config);
}

export function want(...names) {
  for (const name of names) parts[name].wanted = true;
  tick();
}

function tick() {
  const now = performance.now();
  for (const [name, part] of Object.entries(parts)) {
    const since = now - (part.at ?? -Infinity);
    if (since > part.every * 1000 || (part.wanted && since > (part.pause ?? 0))) refresh(name);
  }
}

// ---- Events: which parts have changed ----

const CONCERNS = {
  "training.status": ["head", "curves", "log"], "lifecycle.stage": ["head", "log"], "training.checkpoint": ["results", "log"],
  "training.metric": ["advice", "curves", "log"], "training.validation": ["previews", "log"], "validation.image": ["previews"],
  notification: ["head", "log"], error: ["head", "log"],
};

function listen() {
  events?.close();
  events = new EventSource(`/api/training/events?run=${encodeURIComponent(run)}`);
  for (const [type, names] of Object.entries(CONCERNS)) events.addEventListener(type, () => want(...names));
  events.addEventListener("end", end);
  // Events before the connection, or during an interruption, were missed.
  events.onopen = events.onerror = () => want("head", "advice", "planned", "results", "curves", "previews", "log");
}

// ---- Buttons ----

function tellProblems(texts) {
  problems.replaceChildren(...texts.map((text) => element("li", {}, text)));
  problems.hidden = texts.length === 0;
}

export async function send(path, body) {
  const answer = await api(`/api/training/${path}`, { method: "POST", body });
  tellProblems(sentences(answer));
  refresh("queue"); // at once: it is what the next click is about
  want("head", "list", "log");
  return answer.ok ? answer.data : null;
}

async function startRun(body) {
  const started = (await maySwitch()) && (await send("start", body));
  if (started) choose(started.run);
}

export const forms = {
  continue: (form, button) => {
    const steps = form.steps.valueAsNumber;
    const more = Number.isNaN(steps) || String(steps) === form.dataset.total ? {} : { max_train_steps: steps };
    return button?.name === "queue" ? send("queue", { run, settings: more }) : startRun({ run, settings: more });
  },
  new: async (form) => {
    const made = (await maySwitch()) && (await send("new", { run, name: form.elements.name.value }));
    if (!made) return;
    if (made.left_out.length) tellProblems([`The config ${made.config} is written, but not all of it:`, ...made.left_out]);
    else location.hash = "basic";
    await openConfig(made.config);
  },
};

// Cancel asks, since it cannot be taken back; to stop and save is what one often wants instead.
async function askToCancel(button) {
  const dialog = document.getElementById("cancel-run");
  dialog.querySelector(".what").textContent = button.dataset.loss;
  dialog.querySelector("[value=stop]").hidden = "cannotStop" in button.dataset;
  const choice = await ask(dialog);
  if (choice) send(choice, { run });
}

pane.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-run]");
  if (link && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    choose(link.dataset.run);
  }
  const cancelling = event.target.closest("[data-cancel]");
  if (cancelling) askToCancel(cancelling);
  const button = event.target.closest("button[data-press]");
  if (!button) return;
  if (button.dataset.press === "start") startRun({ run });
  else send(button.dataset.press, { run });
});
pane.addEventListener("submit", (event) => {
  event.preventDefault();
  forms[event.target.dataset.form](event.target, event.submitter);
});

// Shows the run of the opened or saved config; at first, the run in the URL or the first of the list.
document.addEventListener("config", (event) => {
  opened = event.detail;
  follows = linkOfRun(run)?.dataset.config !== opened;
  const known = follows && linkOfConfig(opened);
  if (known) choose(known.dataset.run);
  else want("list");
});
// A run was started elsewhere on the page.
document.addEventListener("started", (event) => {
  choose(event.detail);
  want("list");
});
document.addEventListener("visibilitychange", tick);
addEventListener("hashchange", tick);
setInterval(tick, 500);
if (run) choose(run);
tick();
