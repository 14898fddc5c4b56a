// The dataset file as cards; keys that a card does not show are edited as JSON.
import { asJson, bindField, bindJson, complete, element, inForm, isObject, problemLine, showField, showJson, state, tell } from "./form.js";

const list = inForm("#datasets");
const bookkeeping = inForm("#bookkeeping");
const template = document.querySelector("#dataset-card");
const SHORT = new Set(["id", "dataset_type", "type"]); // all that an entry without samples needs
const part = (entry, key) => key.split(".").reduce((value, name) => value?.[name], entry);
const isBookkeeping = (entry) => Boolean(entry.dataset_type?.endsWith("_embeds"));
let cards = []; // in the order of the entries
let changed = () => {}, numbers = 0, counted = [];

function put(entry, key, value) {
  const [outer, inner] = key.split(".");
  if (inner) {
    const group = { ...entry[outer], [inner]: value };
    if (value === undefined) delete group[inner];
    put(entry, outer, Object.keys(group).length ? group : undefined);
  } else if (value === undefined) delete entry[outer];
  else entry[outer] = value;
}

function matters(key, entry) {
  const kind = entry.dataset_type ?? "image", holdsSamples = !kind.endsWith("_embeds");
  return SHORT.has(key) || (holdsSamples && (!key.startsWith("video.") || kind === "video" || entry.video !== undefined));
}

function refresh(card, entry) {
  card.querySelector("h3").textContent = entry.id || "New dataset";
  card.querySelector(".files").hidden = !entry.instance_data_dir;
  card.querySelector(".files").href = `#dataset/files/${encodeURIComponent(entry.id)}`;
  card.querySelector(".enabled").checked = !(entry.disabled || entry.disable);
  card.classList.toggle("off", Boolean(entry.disabled || entry.disable));
  for (const field of card.querySelectorAll(".field")) {
    field.hidden = !matters(field.dataset.key, entry);
    showField(field, part(entry, field.dataset.key), state.effective[field.dataset.key]);
  }
  const more = card.querySelector(".grid + .more"), count = more.querySelectorAll(".field:not([hidden])").length;
  more.hidden = count === 0;
  more.querySelector("summary").firstChild.textContent = `${count} more `;
  showJson(card.querySelector(".raw"), asJson(entry));
}

function makeCard(index) {
  const card = template.content.firstElementChild.cloneNode(true), prefix = `dataset-${(numbers += 1)}`;
  for (const field of card.querySelectorAll(".field")) complete(field, prefix);
  const entry = () => state.datasets.entries[index];
  const edit = () => { refresh(card, entry()); changed(); };
  for (const field of card.querySelectorAll(".field")) {
    bindField(field, (value) => { put(entry(), field.dataset.key, value); edit(); });
  }
  card.querySelector(".enabled").addEventListener("input", ({ target }) => {
    delete entry().disable;
    put(entry(), "disabled", target.checked ? undefined : true);
    edit();
  });
  card.querySelector(".remove").addEventListener("click", () => {
    state.datasets.entries.splice(index, 1);
    showDatasets();
    changed();
  });
  bindJson(card.querySelector(".raw"), card.querySelector(".json .told"), [isObject, "one JSON object: { }"], (value) => {
    state.datasets.entries[index] = value;
    edit();
  });
  const browse = element("button", { type: "button", className: "browse", textContent: "Browse" });
  browse.addEventListener("click", async () => {
    const { chooseFolder } = await import("./folders.js"), chosen = await chooseFolder(entry().instance_data_dir);
    if (chosen) { put(entry(), "instance_data_dir", chosen); edit(); }
  });
  card.querySelector('[data-key="instance_data_dir"] .set').append(browse);
  return card;
}

// There are no cards until the tab is drawn.
export function showDatasets(planned = counted) {
  if (list.isConnected) placeCards();
  refreshDatasets();
  tellLedger(planned);
}

// The text cache and its like are not data, so they are folded below.
function placeCards() {
  const { entries } = state.datasets;
  cards = entries.map((entry, index) => makeCard(index));
  list.replaceChildren(...cards.filter((card, index) => !isBookkeeping(entries[index])));
  bookkeeping.lastElementChild.replaceChildren(...cards.filter((card, index) => isBookkeeping(entries[index])));
  bookkeeping.hidden = !entries.some(isBookkeeping);
}

export function refreshDatasets() {
  cards.forEach((card, index) => refresh(card, state.datasets.entries[index]));
}

// The key of an entry that a problem is about, "" for all of it; undefined if it is about something else. Problems name
// an entry by its id or number; missing folders of several entries are one problem.
function keyIn(index, { key, entries = [] }) {
  const id = state.datasets.entries[index].id || `[${index}]`, named = key.replace(/^[^:]*\.json: /, "");
  if (entries.includes(id)) return key;
  return named === id || named.startsWith(`${id}.`) || key.includes(`.json[${index}]`) ? named.slice(id.length + 1) : undefined;
}

export const isOfDataset = (problem) => state.datasets.entries.some((entry, index) => keyIn(index, problem) !== undefined);

// Shows problems on the cards of their entries.
export function tellDatasets(problems) {
  cards.forEach((card, index) => {
    const fields = [...card.querySelectorAll(".field:not([hidden])")], told = new Map();
    for (const problem of problems) {
      const key = keyIn(index, problem), fieldOf = (name) => fields.find((each) => each.dataset.key === name);
      if (key === undefined) continue;
      // Problems of a whole entry (its files), and of keys that are only in its JSON.
      const cause = problem.kind === "captions" ? "caption_strategy" : "instance_data_dir"; // of a whole entry: its files
      const place = fieldOf(key) ?? (key ? card : (fieldOf(cause) ?? fields[0]));
      told.set(place, [...(told.get(place) ?? []), problem]);
    }
    for (const field of fields) tell(field, told.get(field) ?? []);
    const hidden = (told.get(card) ?? []).map((problem) => problemLine(problem, `${keyIn(index, problem)}: ${problem.message}`));
    card.querySelector(".json .told").replaceChildren(...hidden);
    for (const fold of card.querySelectorAll("details.more")) fold.open ||= Boolean(fold.querySelector(".told .bad"));
  });
}

function usedFiles({ used, files, held_out: heldOut, learned }) {
  const parts = [`${used} of ${files} files used`];
  if (heldOut) parts.push(`${heldOut} held out`);
  if (learned !== null) parts.push(`${(100 * learned).toPrecision(3)} % learned`);
  return parts.join(", ");
}

// The plan's results for the folders.
export function tellLedger(datasets = []) {
  counted = datasets;
  cards.forEach((card, index) => {
    const found = datasets.find((each) => each.id === state.datasets.entries[index].id), left = found?.left_out ?? [];
    const badge = card.querySelector(".used");
    const ledger = card.querySelector(".ledger");
    badge.hidden = !found;
    badge.textContent = found && usedFiles(found);
    ledger.hidden = !left.length;
    ledger.querySelector("summary").textContent = found && `${found.files - found.used - found.held_out} of ${found.files} files not used`;
    ledger.querySelector("ul").replaceChildren(...left.map(({ file, reason }) => element("li", {}, element("span", { className: "key", textContent: file }), ` ${reason}`)));
  });
}

export function startDatasets(whenChanged) {
  changed = whenChanged;
  inForm("#add-dataset").addEventListener("click", () => {
    state.datasets.entries.push({ id: `dataset-${state.datasets.entries.length + 1}`, type: "local", caption_strategy: "textfile" });
    showDatasets();
    list.lastElementChild.querySelector("input[type=text]").focus();
    changed();
  });
}
