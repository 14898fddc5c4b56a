// The place "Settings": its parts, the search, the open config, and the check after every change.
import { allConfigs, api, ask, bindField, changes, complete, defaultOf, element, fields, inForm, isDirty, LATE, open, page, problemLine, refuseName, remember, reread, save, sentences, showField, state, tell } from "./form.js";
import { isOfDataset, refreshDatasets, showDatasets, startDatasets, tellDatasets, tellLedger } from "./datasets.js";
import { agePlan, clearPlan, showPlan } from "./plan.js";

export { isDirty };

const all = (selector) => [...document.querySelectorAll(selector)];
const drawn = () => [...fields].filter(([, field]) => field.isConnected);
const links = all(".parts a");
const chooser = page("#part"); // the links, on a narrow screen
const defaults = Object.fromEntries([...fields].map(([key, field]) => [key, defaultOf(field)]));
let judged = { problems: [], effective: {}, greyed: {} };
let planned = []; // problems that only the plan finds
let number = 0; // of the latest check
let judging = null; // the promise of the latest check
let told = ""; // the answer to the last save
let refusal = "";
const timers = {};

function later(name, delay, action) {
  clearTimeout(timers[name]);
  timers[name] = setTimeout(action, delay);
}

// ---- Parts: three everyday groups, then folded sections. The URL names one, a whole part, or a field. ----

// Sections of earlier versions.
const MOVED = { basic: "basic/what", "basic/model": "basic/what", dataset: "basic/data", "dataset/training_data": "basic/data" };

async function openFiles() {
  if (location.hash.startsWith("#dataset/files/") || page("#library").open) (await import("./library.js")).show();
}

export function showPart() {
  stopSearch();
  const anchor = decodeURIComponent(location.hash.slice(1));
  const name = anchor.startsWith("dataset/files/") ? "dataset" : anchor;
  const target = document.getElementById(MOVED[name] ?? name) ?? page("[id='basic/what']");
  unfold(target);
  showLinks(target);
  if (target.id === "basic/what") scrollTo(0, 0);
  else target.scrollIntoView();
  openFiles();
}

// Opens what an anchor names: all sections of a part, one section, or those around a field.
function unfold(target) {
  for (const fold of target.querySelectorAll(":scope.part > details")) fold.open = true;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
}

function showLinks(target) {
  const group = target.closest(".everyday")?.id;
  const part = target.closest(".part")?.id;
  for (const link of links) {
    const isHere = part ? link.dataset.part === part : link.getAttribute("href") === `#${group ?? target.id}`;
    link.ariaCurrent = isHere ? "true" : null;
    if (isHere) chooser.value = link.getAttribute("href");
  }
}

chooser.append(...links.map((link) => element("option", { value: link.getAttribute("href"), textContent: link.firstChild.textContent })));
chooser.addEventListener("change", () => { location.hash = chooser.value; });

// A link to the part that the URL names already leads there again.
page(".parts").addEventListener("click", ({ target }) => {
  const link = target.closest("a");
  if (link?.getAttribute("href") === location.hash) showPart();
});

// A section is drawn when it is first opened, searched, or has a problem: the whole form takes long.
function draw(card) {
  const shell = card.querySelector(":scope > template");
  if (!shell) return false;
  shell.replaceWith(shell.content);
  for (const [key, field] of drawn().filter(([, field]) => card.contains(field))) {
    complete(field, "f");
    bindField(field, (value) => set(key, value));
    showField(field, state.values[key], state.effective[key]);
  }
  if (card.querySelector("#datasets")) showDatasets();
  return true;
}

const cards = all("#all-parts .card");
const everyday = cards.filter((card) => card.matches(".everyday"));
for (const card of cards) {
  card.addEventListener("toggle", () => card.open && drawAll([card]));
}
const cardOf = (field) => cards.find((card) => card.contains(field) || card.querySelector(":scope > template")?.content.contains(field));

function drawAll(some) {
  if (some.filter(draw).length) showProblems();
}

// What a folded section holds.
function countFields() {
  for (const card of cards.filter((each) => each.tagName === "DETAILS")) {
    const content = card.querySelector(":scope > template")?.content ?? card;
    const keys = [...content.querySelectorAll(".group .field")].map((field) => field.dataset.key);
    const count = keys.filter((key) => key in state.values).length;
    card.querySelector(".number").textContent = `${keys.length} ${keys.length === 1 ? "option" : "options"}${count ? `, ${count} set` : ""}`;
  }
}

function set(key, value) {
  if (value === undefined) delete state.values[key];
  else state.values[key] = value;
  showField(fields.get(key), state.values[key], state.effective[key]);
  edited();
}

// ---- Search: a flat list in place of the parts; without words, one is again where one was ----

let search = null; // the module, once something was sought

async function filter(query) {
  if (!search && !query.trim()) return;
  drawAll(cards);
  search ??= await import("./search.js");
  search.find(page("#search").value, judged.greyed);
  showProblems();
}

function stopSearch() {
  page("#search").value = "";
  search?.find("");
}

// The open config.
export async function openConfig(name, from = name, configs = null) {
  const refused = await open(from || name, !from);
  if (refused === LATE) return false;
  if (refused) {
    showSaved(`${from} cannot be opened: ${sentences(refused).join("; ")}`);
    return false;
  }
  forget();
  state.config = name;
  told = "";
  if (from !== name) {
    // A new config or copy that is not saved yet; it has its own dataset file and output folder.
    state.values.data_backend_config = `config/${name === "config" ? "" : `${name}/`}multidatabackend.json`;
    state.values.output_dir = `output/${from === `examples/${name}` ? "my-" : ""}${name}`;
    Object.assign(state, { file: {}, etag: null });
    Object.assign(state.datasets, { file: [], etag: null });
  }
  await refill(configs);
  return true;
}

// What is known about a config says nothing about the next one.
function forget() {
  number += 1; // answers to requests on their way are about the last config
  clearTimeout(timers.plan);
  planned = [];
  judged = { problems: [], effective: {}, greyed: {} };
  state.effective = { ...defaults };
  clearPlan();
}

// `configs`: the project's configs, if they have just been read.
async function refill(configs = null) {
  remember("config", state.config);
  inForm("#look").href = `/dataset?config=${encodeURIComponent(state.config)}`;
  document.dispatchEvent(new CustomEvent("config", { detail: state.config }));
  listConfigs(configs);
  showDatasets([]);
  showAll();
  page("#pane-settings").ariaBusy = null;
  await check();
}

// Of a broken file no datasets were read, which is no problem of its own.
const isUnread = () => state.datasets.entries.length === 0 && Boolean(state.broken.config || state.broken.datasets);
const settings = () => ({ config: state.config, values: state.values, datasets: isUnread() ? null : state.datasets.entries });

// Resolves when what the form now holds has been judged: a check that a later one overtakes waits for it.
function check() {
  judging = judge();
  return judging;
}

async function judge() {
  const mine = (number += 1);
  const { ok, status, data } = await api("/api/training/validate", { method: "POST", body: settings() });
  if (mine !== number) return judging;
  if (!status) return; // the server is unreachable; the check is repeated when it is back
  judged = ok ? data : { ...judged, problems: data.problems };
  state.effective = { ...defaults, ...judged.effective };
  offerFlavours(judged.flavours ?? {});
  showAll();
  later("plan", 600, plan);
}

async function plan(more) {
  const mine = number, found = await showPlan(settings(), more);
  if (!found || mine !== number) return;
  planned = found.problems;
  showProblems();
  tellLedger(found.datasets);
}
document.addEventListener("fetch-files", () => plan({ fetch: true }));

// The button of a problem: sets fields, which count as unsaved input.
document.addEventListener("apply", ({ detail }) => {
  for (const [key, value] of Object.entries(detail)) {
    if (value === null) delete state.values[key];
    else state.values[key] = value;
  }
  showAll();
  edited();
});

function offerFlavours(flavours) {
  const list = fields.get("model_flavour").querySelector("select");
  list.replaceChildren(list.options[0], ...Object.entries(flavours).map(([name, about]) => element("option", { value: name, textContent: `${name}: ${about}` })));
}

function showAll() {
  refreshDatasets();
  for (const [key, field] of drawn()) showField(field, state.values[key], state.effective[key]);
  showProblems();
  showSaved();
  showRaw();
  countFields();
}

async function showRaw() {
  if (page("#raw").open || state.broken.config || state.broken.datasets) (await import("./raw.js")).show();
}

function showProblems() {
  const seen = new Set(), problems = [...judged.problems, ...planned].filter(({ key, message }) => {
    const name = `${key}: ${message}`;
    const isRepeated = planned.some((each) => each.key === key && each.message !== message && each.message.startsWith(message));
    return !isRepeated && !seen.has(name) && seen.add(name); // the plan adds what would fit
  });
  const keyOf = (problem) => problem.key.split(/[.[]/)[0];
  const isBlank = !state.etag && !isDirty(); // an empty new config shows no problems yet
  for (const problem of isBlank ? [] : problems.filter(({ fatal }) => fatal)) {
    const field = fields.get(keyOf(problem)); // drawn, so that its section counts it
    if (field && !field.isConnected) draw(cardOf(field));
  }
  for (const [key, field] of drawn()) tell(field, problems.filter((problem) => keyOf(problem) === key), judged.greyed[key] ?? setElsewhere(key));
  all("main .group").forEach(shareReason);
  // The plan's panel shows problems of the device.
  const elsewhere = problems.filter((problem) => !fields.has(keyOf(problem)) && problem.key !== "device"), rest = elsewhere.filter((problem) => !isOfDataset(problem));
  tellDatasets(elsewhere);
  const unreadable = Object.values(state.broken).flatMap((file) => file?.problems ?? []); // their texts are below all fields
  page("#problems").replaceChildren(...[...unreadable, ...rest].map((problem) => element("li", { className: problem.fatal ? "bad" : "warning" }, problemLine(problem))));
  showCounts(isBlank);
}

// Problems are counted at folded sections and at the links to parts.
function showCounts(isBlank) {
  for (const badge of all(".parts .count, .card > summary .count")) {
    const link = badge.closest("a");
    const name = link?.dataset.part ?? link?.getAttribute("href").slice(1);
    const place = link ? document.getElementById(name) : badge.closest(".card");
    const count = isBlank ? 0 : place.querySelectorAll(".told .bad").length;
    badge.hidden = !count;
    badge.textContent = count;
    badge.ariaLabel = `${count} ${count === 1 ? "problem" : "problems"}`;
  }
}

// Defaults of all datasets have no effect where every dataset has a value of its own.
function setElsewhere(key) {
  const data = state.datasets.entries.filter((entry) => !entry.dataset_type?.endsWith("_embeds"));
  const isSet = data.length > 0 && data.every((entry) => key in entry);
  return key.startsWith("resolution") && isSet ? "is set for each dataset, under Data." : undefined;
}

// A reason shared by most greyed fields of a group is shown once.
function shareReason(group) {
  const greyed = Object.groupBy(group.querySelectorAll(".field.greyed"), (field) => judged.greyed[field.dataset.key]);
  const [reason, alike] = Object.entries(greyed).sort(([, a], [, b]) => b.length - a.length)[0] ?? ["", []];
  const plural = { has: "have", needs: "need" }, shared = group.querySelector(".shared");
  shared.hidden = alike.length < 3;
  shared.textContent = reason.replace(/^(has|needs)\b/, (verb) => `${alike.length} options ${plural[verb]}`);
  for (const field of alike) field.querySelector(".reason")?.classList.toggle("sr", !shared.hidden);
}

// The result of saving is shown until the next edit.
function showSaved(text = told) {
  told = text;
  const changed = changes();
  for (const [key, field] of fields) field.classList.toggle("changed", key in changed);
  page("#save").disabled = !isDirty();
  page("#saved").textContent = text || unsavedText(Object.keys(changed).length);
}

function unsavedText(count) {
  if (state.gone) return `${state.gone} was deleted or moved; Save restores it.`;
  if (!isDirty()) return "";
  return count ? `${count} unsaved` : "Datasets unsaved";
}

function edited() {
  planned = [];
  agePlan();
  showSaved("");
  later("check", 200, check);
}

// Resolves to whether it was saved.
async function saveNow() {
  try {
    const saved = await save();
    await refill();
    if (saved) showSaved("Saved");
    return saved;
  } catch (error) {
    refusal = `Not saved: ${error.message}`;
    showSaved(refusal);
    return false;
  }
}

async function listConfigs(configs = null) {
  const found = [...(configs ?? (await allConfigs()))];
  if (!found.some(({ name }) => name === state.config)) found.push({ name: state.config });
  page("#config").replaceChildren(...found.map(({ name, problem }) => element("option", {
    value: name, textContent: (name === "config" ? "config/config.json" : name) + (problem ? " (broken)" : ""), title: problem ?? "", selected: name === state.config,
  })));
}

startDatasets(edited);
document.addEventListener("edited", () => showDatasets());
document.addEventListener("edited", edited);
page("#raw").addEventListener("toggle", showRaw);
page("#search").addEventListener("input", ({ target }) => filter(target.value));
page("#save").addEventListener("click", saveNow);
page("#start-config").addEventListener("click", async () => {
  if (isDirty() && !(await saveNow())) return;
  const obstacle = [...judged.problems, ...planned].find(({ fatal }) => fatal);
  if (obstacle) {
    showSaved(`Not started: ${problemLine({ ...obstacle, remedy: {} }).textContent.trim()}`);
    page(".told .bad, #problems .bad")?.scrollIntoView({ block: "center" });
    return;
  }
  const { begin } = await import("./begin.js");
  showSaved(await begin(state.config));
});

// Asks what to do with unsaved changes; resolves to whether to continue.
export async function maySwitch() {
  const choice = isDirty() ? await ask(page("#leave")) : "discard";
  return choice === "save" ? saveNow() : choice === "discard";
}

document.addEventListener("back", () => { listConfigs(); check(); });

const NEWS = { taken: "The file has changed on disk and was reloaded.", changed: "The file has also changed on disk; Save compares both versions." };

// Files may change while the page is open: it reloads them and updates the plan when it is visible again.
async function lookAgain({ type }) {
  if (document.body.dataset.place !== "settings" || document.hidden || page("dialog[open]")) return;
  const wasGone = state.gone, news = await reread();
  if (news === "taken") await refill();
  if (news in NEWS && (!told || told !== refusal)) showSaved(NEWS[news]);
  else if (state.gone !== wasGone || (!news && told === NEWS.changed)) showSaved("");
  if (!news && type !== "beat") check();
}
document.addEventListener("beat", lookAgain);
document.addEventListener("visibilitychange", lookAgain);
for (const type of ["focus", "hashchange"]) addEventListener(type, lookAgain);
page("#config").addEventListener("change", async ({ target }) => {
  if (await maySwitch()) await openConfig(target.value);
  target.value = state.config;
});
page("#add-config").addEventListener("click", () => newConfig());

// Asks for the name of a new config, and for the config to copy.
export async function newConfig(copied = "") {
  if (!(await maySwitch())) return;
  const { data } = await api("/api/configs/examples"), from = page("#new-from"), name = page("#new-name");
  from.replaceChildren(from.options[0], ...data.map((each) => element("option", { textContent: each.name, selected: each.name === copied })));
  name.value = copied.replace("examples/", "");
  for (let refused = ""; ; ) {
    page("#new .bad").textContent = refused;
    if ((await ask(page("#new"))) !== "create") return;
    refused = await refuseName(name.value.trim());
    if (!refused) break;
  }
  await openConfig(name.value.trim(), from.value);
  location.hash = "basic/what";
}
document.addEventListener("config", openFiles);
addEventListener("beforeunload", (event) => isDirty() && event.preventDefault());
addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") {
    event.preventDefault();
    if (isDirty()) saveNow();
  }
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "/" && !isTyping && document.body.dataset.place === "settings") {
    event.preventDefault();
    page("#search").focus();
  }
});
page("#plan details").open = innerWidth > 1080;
drawAll(everyday);
export const opening = openFirst(new URLSearchParams(location.search).get("config"));

// Opens the config in the URL, or else the first readable one.
async function openFirst(asked) {
  const configs = await allConfigs(), found = configs.toSorted((a, b) => Boolean(a.problem) - Boolean(b.problem)).map(({ name }) => name);
  const isThere = found.includes(asked) || asked?.startsWith("examples/"), isGone = asked && asked !== "config" && !isThere;
  let refused = isGone ? `There is no config ${asked}.` : "", isOpen = false;
  for (const name of isThere ? [asked, ...found] : found) {
    isOpen = await openConfig(name, name, configs);
    if (isOpen) break;
    refused ||= told;
  }
  if (!isOpen) {
    await open("config", true);
    await refill(configs);
  }
  if (refused) showSaved(refused);
}
