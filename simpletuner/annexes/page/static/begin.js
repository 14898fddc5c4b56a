// Starts the saved config of Settings, after asking what must be asked, and shows its run.
import { api, ask, page, remember, sentences } from "./common.js";

const isActive = ({ status }) => ["starting", "running"].includes(status);
const nameOf = ({ config }) => config.name || config.output_dir;

// Resolves to why it was not started, empty if it was or if it was given up.
export async function begin(config) {
  const { ok, data: runs } = await api("/api/metrics/training/runs");
  const questions = ok ? questionsAbout(config, runs) : [];
  const choice = questions.length ? await askAll(questions) : "start";
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

// What one should know before: a run that goes on, and others at work.
function questionsAbout(config, runs) {
  const questions = [];
  const own = runs.find((run) => run.config.name === config && !isActive(run) && run.progress.current > 0);
  if (own) {
    const { current, total } = own.progress;
    questions.push(`Its run stands at step ${current}${total ? ` of ${total}` : ""}; it goes on from its last checkpoint. For a run from the first step, give it another Output Folder.`);
  }
  const others = runs.filter((run) => isActive(run) && run.config.name !== config);
  if (others.length) {
    const verb = others.length === 1 ? "is" : "are";
    questions.push(`${others.map(nameOf).join(", ")} ${verb} training now. Two runs at once slow each other down and may not fit on the card; a queued run starts when nothing else is at work.`);
  }
  return questions;
}

function askAll(questions) {
  const dialog = page("#begin");
  dialog.querySelector(".what").textContent = questions.join(" ");
  return ask(dialog);
}
