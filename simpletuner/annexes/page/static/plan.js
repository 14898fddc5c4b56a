// The plan of the settings on the page: memory, time, steps and disk. A plan for another card than this machine's has
// another colour, and its problems are shown only in this panel.
import { api, element, problemLine } from "./form.js";
import { duration, gigabytes } from "./units.js";

const panel = document.querySelector("#plan"), body = document.querySelector("#plan-body"), verdict = document.querySelector("#verdict");
const whatIf = document.querySelector("#what-if");
const dim = (textContent) => element("p", { className: "dim", textContent });
const pending = {};
let settings = {}, own = null, timer;

// The card to plan for: 4090 is one, and not an amount of memory.
function supposed() {
  const card = whatIf.value.trim(), memory = Number(card);
  return memory > 0 && memory < 1000 ? { device_memory_gb: memory } : card ? { device: card } : null;
}

// Computes and shows the plan of the settings; null if a newer one was requested, or if the server is unreachable.
export async function showPlan(values, more = {}) {
  settings = values;
  const found = await compute("own", more);
  if (!found) return null;
  own = found;
  suppose();
  return own;
}

// Removes the plan of another config.
export function clearPlan() {
  for (const request of Object.values(pending)) request.abort();
  own = null;
  panel.classList.remove("supposed");
  panel.querySelector(".plan-title").textContent = "Plan";
  tellVerdict("", "");
  body.replaceChildren(dim("Computing the plan."));
}

// The settings have changed: what is shown is greyed until the next plan.
export function agePlan() {
  panel.setAttribute("aria-busy", "true");
}

async function suppose() {
  const device = supposed();
  if (!device) return own && draw(own);
  const found = await compute("supposed", device);
  if (found) draw(found, own?.problems ?? []);
}
whatIf.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(suppose, 400); });

// Aborts an older pending request of the same kind.
async function compute(kind, more) {
  pending[kind]?.abort();
  const mine = (pending[kind] = new AbortController());
  panel.setAttribute("aria-busy", "true");
  try {
    const { status, data } = await api("/api/plan", { method: "POST", body: { ...settings, ...more }, signal: mine.signal });
    panel.removeAttribute("aria-busy");
    return status ? data : null; // the page shows that the server is unreachable
  } catch (error) {
    if (error.name === "AbortError") return null;
    throw error;
  }
}

// `known`: the problems of the config itself, if this is the plan for another card.
function draw(plan, known = null) {
  panel.classList.toggle("supposed", Boolean(known));
  panel.querySelector(".plan-title").textContent = known ? "What if" : "Plan";
  const also = (known ? plan.problems : []).filter(({ message }) => !known.some((each) => each.message === message)).map((problem) => problemLine(problem));
  if (!plan.device) {
    const count = plan.problems.filter((problem) => problem.fatal).length;
    tellVerdict(`${count} ${count === 1 ? "problem" : "problems"}`, "stopped");
    body.replaceChildren(...(also.length ? [told(also)] : [dim("The plan will be computed when the problems beside the fields are fixed.")]), ...fetchButton(plan));
    return;
  }
  const { usable, memory, name, note } = plan.device, short = plan.problems.some((problem) => problem.key === "memory");
  const peak = Math.max(...plan.memory.map((phase) => phase.device));
  const lacks = usable !== null && peak > usable ? `${gigabytes(peak - usable)} too much` : "does not fit";
  const slow = plan.problems.filter((problem) => problem.key === "device"); // a published model without a GPU
  if (slow.length) tellVerdict("no GPU", "stopped");
  else tellVerdict(short ? lacks : usable === null ? "" : known ? "would fit" : "fits", short ? "stopped" : "finished");
  const lines = known ? also : slow.map((problem) => problemLine({ ...problem, fatal: true }, problem.message));
  body.replaceChildren(
    ...(lines.length ? [told(lines)] : []),
    dim(`${name}${memory === null ? "" : `, ${gigabytes(usable)} usable`} (${note})`),
    ...fetchButton(plan),
    phases(plan.memory, usable),
    facts(plan),
    ...(plan.buckets.length ? [buckets(plan.buckets)] : []),
    ...plan.assumed.map(dim),
    ...plan.offload_auto.map((line) => (line in plan.proposals && !known ? proposal(line, plan.proposals[line]) : dim(line))),
  );
}

// Choices of `offload: auto` are lines with reasons; a proposal has a button, except in a plan for another card.
const proposal = (message, remedy) => told([problemLine({ key: "", message, remedy })]);
const told = (lines) => element("div", { className: "told" }, ...lines);

// Files of remote datasets are downloaded only on request.
function fetchButton({ problems }) {
  if (!problems.some(({ kind }) => kind === "unfetched")) return [];
  const button = element("button", { type: "button", id: "fetch", textContent: "Fetch now" });
  button.addEventListener("click", () => {
    Object.assign(button, { disabled: true, textContent: "Fetching" });
    document.dispatchEvent(new CustomEvent("fetch-files"));
  });
  return [button];
}

function tellVerdict(text, kind) {
  verdict.textContent = text;
  verdict.className = text ? `state ${kind}` : "";
}

function phases(memory, usable) {
  const most = Math.max(usable ?? 0, ...memory.map((phase) => phase.device)) || 1;
  const rows = memory.map((phase) => {
    const over = usable !== null && phase.device > usable;
    const bar = element("meter", { max: most, value: phase.device, className: over ? "over" : "" });
    bar.setAttribute("aria-label", phase.phase);
    return element("li", {}, element("span", { textContent: phase.phase }), element("b", { textContent: gigabytes(phase.device) }), bar);
  });
  return element("ul", { className: "phases" }, ...rows);
}

function steps({ steps, steps_done: done, finished }) {
  if (finished) return `${steps}, all done`;
  return done ? `${steps - done} of ${steps} left` : steps;
}

function facts({ length, seconds, disk, memory }) {
  const written = disk.reduce((total, each) => total + each.bytes, 0);
  const times = [["A step", duration(seconds.step)], ["Training", duration(seconds.training)], ["Previews", duration(seconds.previews)]];
  const pairs = [
    ["Steps", steps(length)],
    ...(length.finished ? [] : times), // nothing is left that would take time
    ["Disk", gigabytes(written)], ["Host memory", gigabytes(Math.max(...memory.map((phase) => phase.host)))],
  ];
  return element("dl", { className: "plan-facts" }, ...pairs.map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
}

function buckets(found) {
  const rows = found.map((each) => element("li", {}, element("span", { textContent: each.size }), element("b", { textContent: `${Math.round(each.share * 100)} %` })));
  return element("details", { className: "more" }, element("summary", { textContent: `${found.length} ${found.length === 1 ? "bucket" : "buckets"}` }), element("ul", { className: "phases" }, ...rows));
}
