// What `simpletuner plan` says about the settings on the page: memory against the card, time, steps and disk.
import { api, element } from "./form.js";

const body = document.querySelector("#plan-body"), verdict = document.querySelector("#verdict"), whatIf = document.querySelector("#what-if");
export const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
let pending;

export function duration(seconds) {
  if (seconds < 90) return `${seconds.toPrecision(2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

// Computes the plan of these settings; an older request that is not answered yet is given up.
export async function showPlan(settings) {
  pending?.abort();
  pending = new AbortController();
  document.querySelector("#plan").setAttribute("aria-busy", "true");
  const card = whatIf.value.trim(), memory = Number(card);
  // 4090 is a card, not an amount of memory.
  const device = memory > 0 && memory < 1000 ? { device_memory_gb: memory } : card ? { device: card } : {};
  try {
    const { status, data } = await api("/api/plan", { method: "POST", body: { ...settings, ...device }, signal: pending.signal });
    document.querySelector("#plan").removeAttribute("aria-busy");
    if (!status) return null; // the page says that the server is away
    draw(data);
    return data;
  } catch (error) {
    if (error.name === "AbortError") return null;
    throw error;
  }
}

function draw(plan) {
  if (!plan.device) {
    const count = plan.problems.filter((problem) => problem.fatal).length;
    tellVerdict(`${count} ${count === 1 ? "problem" : "problems"}`, "stopped");
    body.replaceChildren(element("p", { className: "dim", textContent: "The plan is made when the problems beside the fields are solved." }), ...fetchButton(plan));
    return;
  }
  const { usable, memory, name } = plan.device, short = plan.problems.some((problem) => problem.key === "memory");
  const peak = Math.max(...plan.memory.map((phase) => phase.device));
  const lacks = usable !== null && peak > usable ? `${gigabytes(peak - usable)} too much` : "does not fit";
  const slow = plan.problems.filter((problem) => problem.key === "device"); // a published model without a GPU
  if (slow.length) tellVerdict("no GPU", "stopped");
  else tellVerdict(short ? lacks : usable === null ? "" : "fits", short ? "stopped" : "finished");
  body.replaceChildren(
    ...slow.map(({ message }) => element("div", { className: "told" }, element("p", { className: "bad", textContent: message }))),
    element("p", { className: "dim", textContent: memory === null ? name : `${name}, ${gigabytes(usable)} usable` }),
    ...fetchButton(plan),
    phases(plan.memory, usable),
    facts(plan),
    ...(plan.buckets.length ? [buckets(plan.buckets)] : []),
    ...plan.offload_auto.map((text) => element("p", { className: "dim", textContent: text })),
  );
}

// Files of remote datasets are fetched only when somebody asks for it.
function fetchButton({ problems }) {
  if (!problems.some(({ message }) => message.includes("not fetched yet"))) return [];
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

function facts({ length, seconds, disk, memory }) {
  const written = disk.reduce((total, each) => total + each.bytes, 0);
  const pairs = [
    ["Steps", length.steps_done ? `${length.steps - length.steps_done} of ${length.steps} left` : length.steps],
    ["A step", duration(seconds.step)], ["Training", duration(seconds.training)], ["Previews", duration(seconds.previews)],
    ["Disk", gigabytes(written)], ["Host memory", gigabytes(Math.max(...memory.map((phase) => phase.host)))],
  ];
  return element("dl", { className: "plan-facts" }, ...pairs.map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
}

function buckets(found) {
  const rows = found.map((each) => element("li", {}, element("span", { textContent: each.size }), element("b", { textContent: `${Math.round(each.share * 100)} %` })));
  return element("details", { className: "more" }, element("summary", { textContent: `${found.length} ${found.length === 1 ? "bucket" : "buckets"}` }), element("ul", { className: "phases" }, ...rows));
}
