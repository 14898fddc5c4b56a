// Starts the saved config of Settings, after asking what must be asked, and shows its run.
import { api, ask, page, remember, sentences } from "./common.js";

const isActive = ({ status }) => ["starting", "running"].includes(status);

// Resolves to why it was not started, empty if it was or if it was given up.
export async function begin(config) {
  const { ok, data: runs } = await api("/api/metrics/training/runs");
  const active = ok ? runs.filter(isActive) : [];
  const choice = active.length ? await askBeside(active) : "start";
  if (!choice) return "";
  const answer = await api(`/api/training/${choice}`, { method: "POST", body: { config } });
  if (!answer.ok) return `Not started: ${sentences(answer).join(" ")}`;
  if (answer.data.run) {
    remember("run", answer.data.run);
    document.dispatchEvent(new CustomEvent("started", { detail: answer.data.run }));
  }
  location.hash = "run";
  return "";
}

// Two runs on one card slow each other down, or do not fit.
function askBeside(active) {
  const names = active.map(({ config }) => config.name || config.output_dir).join(", ");
  const dialog = page("#begin");
  dialog.querySelector(".what").textContent = `${names} is training now. Two runs at once slow each other down and may not fit on the card; a queued run starts when nothing else is at work.`;
  return ask(dialog);
}
