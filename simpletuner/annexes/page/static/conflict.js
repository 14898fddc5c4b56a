// Conflicts: files that were changed, deleted or moved while the page had them open.
import { ask, changes, datasetsChanged, element, isSecret, load, open, page, put, refuseName, same, save, state, takeConfig, written } from "./form.js";

// The page's copy of a missing file, without secrets, which it never received.
const withoutSecrets = (value) => JSON.parse(JSON.stringify(value, (key, inner) => (isSecret(inner) ? undefined : Array.isArray(inner) ? inner.filter((each) => !isSecret(each)) : inner)));
const secretsIn = (value) => Object.entries(value ?? {}).flatMap(([key, inner]) => (isSecret(inner) ? [key] : typeof inner === "object" ? secretsIn(inner) : []));

// Asks what to do about a config or dataset file that was deleted or moved; resolves to whether something was saved.
export async function restore(path) {
  const dialog = page("#gone"), mine = withoutSecrets(changes()), entries = withoutSecrets(state.datasets.entries);
  const secrets = [...new Set(secretsIn([state.values, state.datasets.entries]))].join(", ");
  dialog.querySelector(".what").textContent = `${path} was deleted or moved since it was opened. Nothing was saved, and this page still has everything that it held.${secrets && ` Secrets were never sent here, so enter them again: ${secrets}.`}`;
  for (let refused = ""; ; ) {
    dialog.querySelector(".bad").textContent = refused;
    const choice = await ask(dialog), name = choice === "new" ? page("#gone-name").value.trim() : state.config;
    if (choice === "drop" && (await open(state.config))) await open(state.config, true);
    if (!["restore", "new"].includes(choice)) return false;
    if (choice === "restore") return saveAgain((await load(name)).config.ok ? null : withoutSecrets(state.values), entries);
    refused = await refuseName(name);
    if (refused) continue;
    const touched = datasetsChanged() ? entries : [];
    state.config = name;
    return saveAgain(mine, touched);
  }
}

// Writes missing files: the config, unless it exists, and its dataset file.
async function saveAgain(values, entries) {
  state.gone = "";
  if (values) {
    Object.assign(state, { etag: null, file: {}, values });
    if (!(await put(`/api/configs/${state.config}`, { values }, null, takeConfig))) return false;
  }
  const { datasets } = await load(state.config);
  if (!datasets.etag) Object.assign(state.datasets, { etag: null, file: [], entries });
  return save();
}

// The entries of a dataset file by id; ids may be missing or repeated while the user types.
function byName(entries) {
  const named = {};
  for (const [index, entry] of entries.entries()) named[!entry.id || entry.id in named ? `${entry.id ?? ""}[${index}]` : entry.id] = entry;
  return named;
}

const changed = (values, own) => Object.fromEntries(Object.entries({ ...values, ...own }).filter(([, value]) => value !== null));

// Merges the page's changes into the file's current content: entries removed on the page are removed, and entries
// removed from the file are restored if the page has changed them.
function merged(theirs, mine, file) {
  const isKept = (name) => (name in mine ? name in theirs || !same(mine[name], file[name]) : !(name in file));
  const entry = (name) => (name in theirs && name in mine ? changed(theirs[name], changes(mine[name], file[name] ?? {})) : (theirs[name] ?? mine[name]));
  return Object.keys({ ...theirs, ...mine }).filter(isKept).map(entry);
}

// Asks which of two versions to keep; resolves to whether one was saved or taken.
export async function settle(answer, take) {
  const { data } = answer, dialog = page("#conflict"), isDatasets = Boolean(data.entries);
  const [theirs, mine, file] = isDatasets ? [data.entries, state.datasets.entries, state.datasets.file].map(byName) : [data.values, state.values, state.file].map((values) => ({ "": values }));
  const cell = (value) => element("td", { className: "key", textContent: value === undefined ? "not set" : written(value) });
  const rows = Object.keys({ ...theirs, ...mine }).flatMap((name) => {
    const own = changes(mine[name] ?? {}, file[name] ?? {}), differing = Object.keys(changes(mine[name] ?? {}, theirs[name] ?? {}));
    return differing.map((key) => [name ? `${name}: ${key}` : key, theirs[name]?.[key], key in own ? mine[name]?.[key] : "not changed by you"]);
  });
  dialog.querySelector(".what").textContent = `${data.path} has changed since it was opened. Nothing was saved, and nothing is lost: this is what differs.`;
  dialog.querySelector("tbody").replaceChildren(...rows.map((cells) => element("tr", {}, ...cells.map(cell))));
  const kept = merged(theirs, mine, file), choice = await ask(dialog);
  if (!choice || choice === "keep") return false;
  take(answer);
  if (choice === "theirs") return true;
  if (isDatasets) state.datasets.entries = kept;
  else state.values = kept[0];
  return save();
}
