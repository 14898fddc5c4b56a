// The search: fields as one flat list, the best first, in place of the parts. The fields themselves are moved into the
// list, so that they are edited there, and moved back when the search ends.
import { element, page } from "./common.js";
import { fields } from "./form.js";

const list = page("#found");
const parts = page("#all-parts");
const none = page("#no-match");
const homes = new Map(); // a mark in the place of each field in the list
let place = null; // how far the parts were scrolled

const plain = (text) => ` ${text.toLowerCase().replace(/[^\p{L}\p{N}.]+/gu, " ").trim()} `;
const labelOf = (field) => field.querySelector("label").textContent;

// Shows what matches a query; without a query, the parts as they were.
export function find(query, greyed = {}) {
  takeBack();
  const isSearching = query.trim() !== "";
  if (isSearching && list.hidden) place = scrollY;
  list.hidden = !isSearching;
  parts.hidden = isSearching;
  none.hidden = true;
  if (isSearching) showFound(ranked(query, greyed));
  else if (place !== null) leave();
}

function leave() {
  scrollTo(0, place);
  place = null;
}

function showFound(found) {
  scrollTo(0, 0);
  none.hidden = false;
  none.textContent = found.length ? `${found.length} ${found.length === 1 ? "option" : "options"}` : "No option matches.";
  for (const field of found) {
    const crumb = element("p", { className: "crumb", textContent: pathTo(field) });
    const row = element("div", { className: "result" }, crumb);
    list.append(row);
    if (fields.get(field.dataset.key) === field) moveInto(row, field);
    else row.append(leadTo(field));
  }
}

function moveInto(row, field) {
  const mark = document.createComment(field.dataset.key);
  field.replaceWith(mark);
  homes.set(field, mark);
  row.append(field);
}

// Back into the parts.
function takeBack() {
  for (const [field, mark] of homes) mark.replaceWith(field);
  homes.clear();
  list.replaceChildren();
}

// A key of a dataset is edited on the card of its dataset.
function leadTo(field) {
  const button = element("button", { type: "button", className: "lead", textContent: labelOf(field) });
  button.addEventListener("click", () => {
    page("#search").value = "";
    find("");
    for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    field.scrollIntoView({ block: "center" });
    field.querySelector("input, select, textarea").focus();
  });
  return element("div", {}, button, element("p", { className: "help", textContent: field.querySelector(".help").textContent }));
}

// Where a field stands, such as "Training, Loss functions, CREPA".
function pathTo(field) {
  const card = field.closest(".card");
  const dataset = field.closest(".dataset-card")?.querySelector("h3").textContent;
  const names = [
    card.closest(".part")?.querySelector("h2").textContent,
    card.matches("details") ? card.getAttribute("aria-label") : card.querySelector("h2").textContent,
    field.closest(".group")?.querySelector(":scope > h3")?.textContent,
    dataset && `dataset ${dataset}`,
  ];
  return [...new Set(names.filter(Boolean))].join(", ");
}

// ---- Ranks ----

function ranked(query, greyed) {
  const all = [...parts.querySelectorAll(".group .field, .dataset-card .field:not([hidden])")];
  const rows = all.map((field) => ({ field, rank: rankOf(field, query), isGreyed: field.dataset.key in greyed }));
  const found = rows.filter(({ rank }) => rank < NO_MATCH);
  found.sort((a, b) => a.isGreyed - b.isGreyed || a.rank - b.rank); // stable: else in the order of the page
  return found.map(({ field }) => field);
}

const NO_MATCH = 9;

// The lower, the better. Words match by their beginnings: "oom" does not match "room".
function rankOf(field, query) {
  const { key, words = "" } = field.dataset;
  const wanted = plain(query);
  const label = plain(labelOf(field));
  const name = plain(key.replaceAll("_", " "));
  if ([label, name, plain(key)].includes(wanted)) return 0;
  const begins = wanted.trimEnd();
  if (label.startsWith(begins) || name.startsWith(begins)) return 1;
  if (plain(words).includes(begins)) return 2;
  const parts = wanted.trim().split(" ");
  const inAll = (text) => parts.every((part) => text.includes(` ${part}`));
  if (inAll(`${label}${name}${plain(key)}`)) return 3;
  const group = field.closest(".group")?.dataset.group ?? "";
  if (inAll(plain(`${key} ${key.replaceAll("_", " ")} ${words} ${group} ${field.textContent}`))) return 4;
  return NO_MATCH;
}
