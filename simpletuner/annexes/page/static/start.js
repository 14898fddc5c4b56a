// The pane "Start": uploads files, asks what to learn from them, and starts the run.
import { api, element, page, sentences } from "./common.js";
import { chooseFolder } from "./folders.js";
import { maySwitch, newConfig, openConfig } from "./app.js";
import { duration, gigabytes } from "./units.js";

const { suffixes, unread, files: most, bytes: largest } = page("#start-card").dataset;
const usable = new Set(suffixes.split(" ")), unreadable = new Set(unread.split(" "));
const drop = page("#drop"), form = page("#start-form"), progress = page("#drop-progress");
const AT_ONCE = 3; // concurrent uploads
let place = null; // the server's name for the folder of dropped files
let folder = "", lost = [], seen = null, number = 0; // lost: files of the latest drop that were not saved
const words = JSON.parse(page("#start-words").textContent); // translations, by English text
const say = (text, values = {}) => (words[text] ?? text).replace(/{(\w+)}/g, (_, name) => values[name]);
const demo = say("A tiny demo model, to see in minutes how everything works: it draws simple shapes only");
const TITLES = { demo, "demo-video": demo }; // of models
const tell = (text) => { page("#start-told").textContent = text; };
const refuse = (answer) => { page("#start-refused").textContent = sentences(answer).join(" "); };

// ---- Files ----

// The dropped files, with their relative paths.
async function* walk(entry, above = "") {
  const name = above + entry.name;
  if (entry instanceof File) yield { name, file: entry };
  if (entry.isFile) yield { name, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) };
  const reader = entry.isDirectory && entry.createReader();
  for (let some = [true]; reader && some.length; ) {
    some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    for (const each of some) yield* walk(each, `${name}/`);
  }
}

async function dropped(entries) {
  const found = [];
  for (const entry of entries) {
    for await (const each of walk(entry)) if (found.push(each) > most) return found;
  }
  return found;
}

// Why a file is not sent.
function fault({ name, file }) {
  if (/(^|\/)\./.test(name)) return say("is hidden: its name starts with a dot");
  const suffix = name.slice(name.lastIndexOf(".")).toLowerCase();
  if (unreadable.has(suffix)) return say("is in a format that is not read: save pictures as .png or .jpg, clips as .mp4");
  if (!usable.has(suffix)) return say("is not a picture, a clip, a caption (.txt, .caption) or a zip");
  return file.size > largest ? say("is larger than {size}", { size: gigabytes(largest) }) : "";
}

function send(name, file, tick) {
  return new Promise((resolve) => {
    const request = new XMLHttpRequest(); // fetch does not report upload progress
    request.open("PUT", `/api/uploads/${[place.name, ...name.split("/")].map(encodeURIComponent).join("/")}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.responseType = "json";
    request.upload.onprogress = ({ loaded }) => tick(Math.min(loaded, file.size));
    request.onloadend = () => {
      const reason = request.response?.problems?.[0].message ?? say("did not arrive: the connection broke; drop it again");
      resolve(request.status === 201 ? request.response : { saved: [], skipped: [{ file: name, reason }] });
    };
    request.send(file);
  });
}

async function take(found) {
  if (!found.length) return;
  if (found.length > most) return tell(say("These are more than {most} files. Copy the folder into the project, then use it from there.", { most: Number(most).toLocaleString("en") }));
  // Named after the dropped folder or zip.
  const top = found[0].name.split("/")[0], isFolder = found.every(({ name }) => name.startsWith(`${top}/`));
  const named = isFolder ? found.map(({ name, file }) => ({ name: name.slice(top.length + 1), file })) : found;
  lost = named.map((each) => ({ file: each.name, reason: fault(each) })).filter(({ reason }) => reason);
  const queue = named.filter((each) => !fault(each)), all = queue.length;
  if (all && !place) {
    const made = await api("/api/uploads", { method: "POST", body: { name: isFolder || /\.zip$/i.test(top) ? top.replace(/\.zip$/i, "") : "" } });
    if (!made.ok) return tell(sentences(made).join(" "));
    place = made.data;
  }
  const sent = new Map();
  let saved = 0;
  progress.hidden = !all;
  progress.max = Math.max(1, queue.reduce((sum, { file }) => sum + file.size, 0));
  const work = async () => {
    for (let each = queue.shift(); each; each = queue.shift()) {
      const { name, file } = each;
      tell(say("Sending {name}, {number} of {all}", { name, number: all - queue.length, all }));
      const answer = await send(name, file, (bytes) => {
        sent.set(name, bytes);
        progress.value = [...sent.values()].reduce((sum, size) => sum + size, 0);
      });
      saved += answer.saved.length;
      lost.push(...answer.skipped);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  progress.hidden = true;
  showSkipped(lost);
  if (saved || folder) await look(saved ? place.folder : folder);
  else tell(say("None of these files can be used."));
}

function showSkipped(skipped, more = 0) {
  const box = page("#start-skipped"), count = skipped.length + more;
  box.hidden = !count;
  box.querySelector("summary").textContent = say(count === 1 ? "1 file was skipped" : "{count} files were skipped", { count });
  box.querySelector("ul").replaceChildren(...skipped.slice(0, 200).map(({ file, reason }) => element("li", {}, element("span", { className: "key", textContent: file }), `: ${reason}`)));
}

drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  await take(await dropped([...event.dataTransfer.items].map((item) => item.webkitGetAsEntry() ?? item.getAsFile()).filter(Boolean)));
});
for (const input of drop.querySelectorAll("input")) {
  const choose = () => {
    const found = [...input.files].map((file) => ({ name: file.webkitRelativePath || file.name, file }));
    input.value = ""; // so that the same files can be chosen again
    take(found);
  };
  input.addEventListener("change", choose);
  choose(); // files chosen before this script was loaded
}
page("#drop-here").addEventListener("click", async () => {
  const chosen = await chooseFolder(folder);
  if (!chosen) return;
  [place, lost] = [null, []];
  await look(chosen);
});

// ---- Answers ----

const chosen = (name) => form.elements[name]?.value ?? "";

function choices(box, name, labels, value) {
  const rows = Object.entries(labels).map(([each, label]) => element("label", { className: "choice" }, element("input", { type: "radio", name, value: each, checked: each === value }), ` ${say(label)}`, element("span", { className: "dim" })));
  box.replaceChildren(...rows);
}

// Requests the content of the folder and the drafts of runs.
async function look(path, answers = {}) {
  const mine = (number += 1), answer = await api("/api/start/look", { method: "POST", body: { folder: path, ...answers } });
  if (mine !== number) return;
  form.hidden = !answer.ok;
  if (!answer.ok) return tell(sentences(answer).join(" "));
  const isNew = path !== folder;
  [folder, seen] = [path, answer.data];
  const heldOut = seen.held_out ? say("; held out of training, to compare checkpoints on them: {count}", { count: seen.held_out }) : "";
  tell([`${seen.folder}: ${seen.described}${heldOut}${seen.notes.length ? "." : ""}`, ...seen.notes].join(" "));
  showSkipped([...lost, ...seen.skipped], seen.more_skipped);
  choices(page("#start-purposes"), "purpose", seen.purposes, seen.purpose);
  const models = Object.keys(seen.drafts), model = models.includes(chosen("model")) ? chosen("model") : models[0];
  choices(page("#start-models"), "model", Object.fromEntries(models.map((each) => [each, TITLES[each] ?? each])), model);
  if (isNew) form.elements.name.value = seen.name;
  showCaptions();
  await judge(mine);
}

function showCaptions() {
  const { uncaptioned, files, purpose } = seen, some = uncaptioned < files || purpose === "edit", box = form.elements.captions;
  page("#start-trigger").hidden = purpose === "edit";
  page("#start-captions").hidden = !uncaptioned;
  page("#start-captions p").textContent = some
    ? say("{uncaptioned} of {files} files have no caption. Write the config, then captions on the tab Dataset or with: simpletuner caption env={name}", seen)
    : say("No file has a caption, so each is trained with the words above. A caption for each is better: write the config, then captions on the tab Dataset or with simpletuner caption.");
  if (uncaptioned && some) box.checked = true;
  box.disabled = some;
  for (const button of form.querySelectorAll("[value=start], [value=queue]")) button.disabled = Boolean(uncaptioned) && box.checked;
}

// Shows a summary of the plan of each model, and selects the first that fits.
async function judge(mine) {
  let isOpen = true;
  for (const [model, draft] of Object.entries(seen.drafts)) {
    const input = form.querySelector(`[name=model][value="${model}"]`), note = input.parentElement.lastChild;
    note.textContent = say("computing");
    const { data } = await api("/api/plan", { method: "POST", body: draft });
    if (mine !== number) return;
    const [fits, text] = verdict(data);
    note.textContent = text;
    if (fits && isOpen && !form.dataset.model) input.checked = true;
    isOpen &&= !fits;
  }
}

function verdict({ device, model, problems, seconds }) {
  const isTold = (key) => problems.some((problem) => problem.key === key);
  const fatal = problems.find((problem) => problem.fatal && problem.key !== "memory" && problem.kind !== "captions");
  if (fatal || !device) return [false, fatal ? `${fatal.key}: ${fatal.message}` : say("the plan needs captions")];
  const loaded = model.download ? say(", {size} to download", { size: gigabytes(model.download) }) : "";
  const time = say("about {time} without previews", { time: duration(seconds.training) }) + loaded;
  if (isTold("device")) return [false, say("no GPU can be used here; on the CPU {time}", { time })];
  return isTold("memory") ? [false, say("does not fit {device}", { device: device.name })] : [true, say("fits, {time}", { time })];
}

form.addEventListener("change", ({ target }) => {
  if (target.name === "model") form.dataset.model = target.value;
  if (target.name === "captions") showCaptions();
  if (target.name === "purpose") look(folder, { purpose: target.value, name: chosen("name") });
});

// Writes the config, then starts or queues it.
async function begin(how) {
  if (!(await maySwitch())) return;
  const answers = { folder, purpose: chosen("purpose"), trigger: chosen("trigger"), model: chosen("model"), name: chosen("name"), captions: form.elements.captions.checked };
  const written = await api("/api/start/write", { method: "POST", body: answers });
  refuse(written);
  if (!written.ok) return;
  const { config } = written.data;
  const begun = how === "write" ? written : await api(`/api/training/${how}`, { method: "POST", body: { config } });
  refuse(begun);
  if (begun.ok) {
    form.hidden = true;
    [place, folder, lost] = [null, "", []];
    showSkipped([]);
    location.hash = how === "write" ? "dataset" : "run";
  }
  tell(begun.ok ? "" : say("config/{config} is written, and cannot start yet.", { config }));
  await openConfig(config);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  form.inert = true;
  await begin(event.submitter.value);
  form.inert = false;
});

for (const tile of document.querySelectorAll(".tiles button")) tile.addEventListener("click", () => newConfig(`examples/${tile.dataset.example}`));
