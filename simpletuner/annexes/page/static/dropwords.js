// Captions of a drop, one picture at a time.
import { api, page, say, sentences } from "./common.js";
import { address, fetchPage } from "./drop.js";
import { Writer } from "./writer.js";

const isAsked = ({ out, faults }) => !out && !faults.some(({ kind }) => kind === "unreadable");

// The files of a folder, without those that are not trained.
function sourceOf(folder, answers) {
  const fetchFiles = async (from) => {
    const answer = await fetchPage(folder, answers, "", from);
    if (!answer.ok) return { files: [], next: from, found: 0, problem: sentences(answer).join(" ") };
    const { files, found, counts } = answer.data;
    const left = (counts.out ?? 0) + (counts.unreadable ?? 0);
    return { files: files.filter(isAsked), next: from + files.length, found: found - left, problem: "" };
  };
  const save = async (file, text) => {
    const body = { ...answers, folder, file: file.name, text };
    const answer = await api("/api/drop/caption", { method: "PUT", etag: file.tag || undefined, body });
    return { ok: answer.ok, problem: sentences(answer).join(" "), file: answer.data.file };
  };
  return { fetchFiles, save, address, say };
}

// Asks for captions, from a file on or from the first that has none. Resolves to true if the user wants to start.
export async function writeCaptions(folder, answers, name = "") {
  const writer = new Writer(page("#drop-words"), sourceOf(folder, answers));
  return (await writer.open(name)) === "start";
}
