// Captions, one picture at a time: large, with a text box and keys to go on. The New card and the files of a dataset use it.
import { element, page } from "./common.js";

const MOST_FETCHES = 4; // before it opens, in search of the first file without a caption

const isEmpty = ({ text, locked }) => !locked && !text?.trim();

function loadStyle() {
  const href = "/static/writer.css";
  if (!page(`[href="${href}"]`)) document.head.append(element("link", { rel: "stylesheet", href }));
}

// What a source offers:
//   fetchFiles(from): resolves to { files, next, found, problem }: some files, the number from which to go on, and how
//     many there are; files that are not asked for are left out of `files` and `found`
//   save(file, text): resolves to { ok, problem, file }, the file with its new text and tag
//   address(file, route): the URL of a thumbnail, or of the "media" itself
//   say(text, values): a text in the language of the page
export class Writer {
  constructor(dialog, source) {
    loadStyle();
    this.dialog = dialog;
    this.source = source;
    this.area = this.find("textarea");
    this.told = this.find(".told");
    this.files = []; // so far
    this.found = 0; // of all
    this.next = 0; // the first that was not fetched
    this.at = 0;
    this.saving = Promise.resolve([true]);
    dialog.onclick = ({ target }) => this.act(target.closest("button")?.value);
    dialog.onkeydown = (event) => this.press(event);
    dialog.oncancel = (event) => {
      event.preventDefault();
      this.leave("");
    };
  }

  find(selector) {
    return this.dialog.querySelector(selector);
  }

  button(value) {
    return this.find(`[value=${value}]`);
  }

  // Begins at a file, or at the first without a caption. Resolves to the value of the button that ends it.
  async open(name = "") {
    await this.fetchMore();
    const isFirst = (file) => (name ? file.name === name : isEmpty(file));
    for (let fetches = 1; !this.files.some(isFirst) && this.hasMore; fetches += 1) {
      if (fetches === MOST_FETCHES && !name) break;
      await this.fetchMore();
    }
    if (!this.files.length) return "";
    await this.show(Math.max(0, this.files.findIndex(isFirst)));
    return new Promise((resolve) => {
      this.dialog.returnValue = "";
      this.dialog.onclose = () => resolve(this.dialog.returnValue);
      this.dialog.showModal();
      this.area.focus();
    });
  }

  get hasMore() {
    return this.files.length < this.found;
  }

  async fetchMore() {
    const { files, next, found, problem } = await this.source.fetchFiles(this.next);
    this.told.textContent = problem;
    this.files.push(...files);
    // After the end, or while nothing can be fetched, the files so far are all.
    this.found = next === this.next ? this.files.length : found;
    this.next = next;
  }

  async show(index) {
    if (index >= this.files.length && this.hasMore) await this.fetchMore();
    this.at = Math.min(index, this.files.length - 1);
    const file = this.files[this.at];
    this.find("h2").textContent = file.title ?? file.name;
    this.tell(this.source.say("{number} of {count}", { number: this.at + 1, count: this.found }));
    this.find(".large").replaceChildren(this.picture(file));
    this.area.value = file.typed ?? (file.text ?? "").trimEnd();
    this.area.readOnly = Boolean(file.locked);
    this.told.textContent = file.locked;
    this.button("back").disabled = this.at === 0;
    this.fetchAhead(this.files[this.at + 1]);
  }

  tell(text) {
    this.find(".place").textContent = text;
  }

  picture(file) {
    const { address } = this.source;
    if (!file.is_clip) return element("img", { src: `${address(file)}&large=1`, alt: file.title ?? file.name });
    return element("video", { src: address(file, "media"), poster: address(file), controls: true, loop: true, muted: true });
  }

  // Fetches the next picture before it is asked for.
  fetchAhead(file) {
    if (file && !file.is_clip) new Image().src = `${this.source.address(file)}&large=1`;
  }

  // Saves the caption of the shown file if it was changed. One goes on while it is sent; if that fails, its file is shown
  // again with the reason and what was typed.
  async save() {
    const index = this.at;
    const file = this.files[index];
    const text = this.area.value.trim();
    if (file.locked || text === (file.text ?? "").trim()) return true;
    file.typed = text;
    const answer = await this.source.save(file, text);
    if (answer.file) file.tag = answer.file.tag;
    if (answer.ok) {
      file.text = answer.file.text;
      delete file.typed;
      return true;
    }
    await this.show(index);
    this.told.textContent = answer.file?.text ? `${answer.problem} “${answer.file.text.trim()}”` : answer.problem;
    return false;
  }

  saveLater() {
    this.saving = Promise.all([this.saving, this.save()]).then(([before, isSaved]) => [...before, isSaved]);
  }

  async go(step) {
    this.saveLater();
    if (step > 0 && this.at + 1 >= this.found) return this.end(this.source.say("That was the last one."));
    await this.show(Math.max(0, this.at + step));
    this.area.focus();
  }

  async goToEmpty() {
    this.saveLater();
    const isNext = (file, index) => index > this.at && isEmpty(file);
    while (!this.files.some(isNext) && this.hasMore) {
      this.tell(this.source.say("Looking for a file without a caption …"));
      await this.fetchMore();
    }
    const index = this.files.findIndex(isNext);
    if (index < 0) return this.end(this.source.say("All files after this one have a caption."));
    await this.show(index);
    this.area.focus();
  }

  end(text) {
    this.tell(text);
    (this.button("start") ?? this.button("close")).focus();
  }

  async leave(value) {
    const before = await this.saving;
    const isSaved = await this.save();
    if (before.every(Boolean) && isSaved) this.dialog.close(value);
    this.saving = Promise.resolve([true]);
  }

  act(name) {
    if (name === "back") this.go(-1);
    if (name === "next") this.go(1);
    if (name === "empty") this.goToEmpty();
    if (name === "close") this.leave("");
    if (name === "start") this.leave("start");
  }

  press(event) {
    const name = this.actOf(event);
    if (!name) return;
    event.preventDefault();
    this.act(name);
  }

  actOf({ key, target, shiftKey, ctrlKey, metaKey, isComposing }) {
    if (key === "PageUp") return "back";
    if (key === "PageDown") return "next";
    // While a word is composed, as in Chinese, Enter ends the word.
    if (key !== "Enter" || target !== this.area || shiftKey || isComposing) return "";
    return ctrlKey || metaKey ? "empty" : "next";
  }
}
