// The list of runs: search, and what is done with chosen ones: compare, archive, bring back, delete. The server renders
// the rows; this adds the controls around them, and keeps which rows are chosen.
import { api, element, say, sentences } from "./common.js";
import { choose, run, want } from "./run.js";

const list = document.querySelector('.run-list [data-part="list"]');
const inRun = document.body.classList.contains("in-run"); // such a page shows one run, and changes none
const MOST = 6; // runs in a comparison
const SEARCHED = 6; // fewer rows need no search
const picked = new Set();

const search = element("input", { type: "search", placeholder: say("Search runs"), ariaLabel: say("Search runs"), hidden: true });
const count = element("span");
const compare = element("button", { type: "button", textContent: say("Compare") });
const archive = element("button", { type: "button", textContent: say("Archive") });
const clear = element("button", { type: "button", textContent: say("Clear") });
const actions = element("div", { className: "run-actions", role: "group", ariaLabel: say("Chosen runs"), hidden: true }, count, compare, archive, clear);
const note = element("p", { className: "run-note", role: "status", hidden: true });
list.before(search, actions, note);

const boxes = () => [...list.querySelectorAll("[data-pick]")];
const rows = () => [...list.querySelectorAll("[data-sought]")];

// ---- The search, and the chosen rows: again after every change, since rows move ----

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows()) {
    const isFound = words.every((word) => row.dataset.sought.includes(word));
    if (row.hidden === isFound) row.hidden = !isFound;
  }
  for (const group of list.querySelectorAll("details")) {
    const isEmpty = !group.querySelector("li:not([hidden])");
    if (group.hidden !== isEmpty) group.hidden = isEmpty;
    if (words.length && !isEmpty) group.open = true;
  }
}

function showPicked() {
  const there = new Set(boxes().map((box) => box.dataset.pick));
  for (const id of picked) if (!there.has(id)) picked.delete(id);
  for (const box of boxes()) box.checked = picked.has(box.dataset.pick);
  actions.hidden = picked.size === 0;
  count.textContent = say("{count} chosen", { count: picked.size });
  compare.disabled = picked.size < 2 || picked.size > MOST;
  compare.title = picked.size > MOST ? say("At most {count} runs", { count: MOST }) : "Curves, settings that differ and last previews, side by side";
}

function follow() {
  search.hidden = rows().length < SEARCHED && !search.value;
  filter();
  showPicked();
}

search.addEventListener("input", filter);
list.addEventListener("change", ({ target }) => {
  if (!target.dataset.pick) return;
  if (target.checked) picked.add(target.dataset.pick);
  else picked.delete(target.dataset.pick);
  showPicked();
});
clear.addEventListener("click", () => {
  picked.clear();
  showPicked();
});
compare.addEventListener("click", () => {
  const asked = boxes().map((box) => box.dataset.pick).filter((id) => picked.has(id));
  location.href = `/compare?${new URLSearchParams(asked.map((id) => ["run", id]))}`;
});

// ---- Archive and bring back ----

function tell(text, ...more) {
  note.replaceChildren(text, ...more);
  note.hidden = !text;
}

function usedBy({ used_by: users }) {
  return users.length ? ` ${users.join(", ")} still names its old folder.` : "";
}

// Moves a run; the page goes on showing it. Resolves to the answer.
async function move(path, id) {
  const wasShown = run === id;
  const answer = await api(`/api/runs/${path}`, { method: "POST", body: { run: id } });
  if (answer.ok && wasShown) choose(answer.data.run);
  return answer;
}

async function archiveAll(ids) {
  const moved = [];
  const refused = [];
  for (const id of ids) {
    const answer = await move("archive", id);
    if (answer.ok) moved.push(answer.data);
    else refused.push(...sentences(answer));
  }
  picked.clear();
  showPicked();
  want("list", "queue", "head");
  const folders = moved.map((each) => each.folder).join(", ");
  const stays = moved.length > 1 ? "Their configs stay." : "Its config stays.";
  const told = moved.length ? `Archived as ${folders}. ${stays}${moved.map(usedBy).join("")} ` : "";
  const undo = element("button", { type: "button", textContent: say("Undo") });
  undo.addEventListener("click", () => bringBack(moved.map((each) => each.run)));
  tell(told, ...(moved.length ? [undo] : []), ...refused.map((text) => element("span", { className: "bad" }, text)));
}

async function bringBack(ids) {
  const texts = [];
  for (const id of ids) {
    const answer = await move("bring-back", id);
    if (answer.ok) texts.push(`${answer.data.folder} is back.`);
    else texts.push(...sentences(answer));
  }
  want("list", "queue", "head");
  tell(texts.join(" "));
}

archive.addEventListener("click", () => archiveAll([...picked]));

// ---- Delete: after a look at what is lost, and a box that must be ticked ----

const dialog = element("dialog", { id: "delete-run" });
dialog.setAttribute("aria-labelledby", "delete-title");
const title = element("h2", { id: "delete-title" });
const lost = element("div");
const refusal = element("p", { className: "bad", role: "alert", hidden: true });
const keep = element("button", { type: "button", textContent: say("Keep it") });
const confirm = element("button", { type: "button", className: "danger", textContent: say("Delete for good"), disabled: true });
dialog.append(title, lost, refusal, element("div", { className: "tools-row" }, keep, confirm));
document.body.append(dialog);
let doomed = "";

async function askToDelete(id, name) {
  doomed = id;
  title.textContent = say("Delete {name}?", { name });
  refusal.hidden = true;
  confirm.disabled = true;
  const answer = await fetch(`/runs/${encodeURIComponent(id)}/contents`).catch(() => null);
  if (doomed !== id) return; // another run was chosen meanwhile
  if (answer?.ok) {
    lost.innerHTML = await answer.text(); // the server's own HTML
  } else {
    lost.replaceChildren();
    refuse(answer ? `The server answers ${answer.status}.` : "The server does not answer.");
  }
  if (!dialog.open) dialog.showModal();
}

function refuse(text) {
  refusal.textContent = text;
  refusal.hidden = false;
}

lost.addEventListener("change", () => {
  confirm.disabled = !lost.querySelector(".sure")?.checked;
});
keep.addEventListener("click", () => dialog.close());
confirm.addEventListener("click", async () => {
  confirm.disabled = true;
  const body = { run: doomed, confirmed: lost.querySelector("[data-digest]").dataset.digest };
  const answer = await api("/api/runs/delete", { method: "POST", body });
  if (!answer.ok) {
    refuse(sentences(answer).join(" "));
    return;
  }
  dialog.close();
  want("list");
  tell(`Deleted: ${answer.data.files.toLocaleString("en")} files.`);
});

list.addEventListener("click", ({ target }) => {
  const { back, delete: id } = target.dataset;
  if (back) bringBack([back]);
  if (id) askToDelete(id, target.closest("li").querySelector("b").textContent);
});

if (!inRun) {
  const changes = { childList: true, subtree: true, attributes: true, attributeFilter: ["hidden", "data-pick"] };
  new MutationObserver(follow).observe(list, changes);
  follow();
}
