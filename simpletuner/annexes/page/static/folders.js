// A dialog to browse the folders that the server may show.
import { api, ask, element, page } from "./common.js";

// Resolves to the chosen folder, or "" on Cancel.
export async function chooseFolder(start) {
  const dialog = page("#browser");
  let here = "", inside = "";
  const go = async (path) => {
    const { ok, data } = await api(`/api/datasets/browse?path=${encodeURIComponent(path)}`);
    if (!ok) return path === "." ? undefined : go(".");
    here = data.path;
    inside = here.startsWith(`${data.roots[0]}/`) ? here.slice(data.roots[0].length + 1) : here; // of the project, as people write it
    dialog.querySelector(".here").textContent = here;
    const files = Object.entries(data.files).map(([kind, count]) => `${count} ${kind}`).join(", ");
    dialog.querySelector(".count-of-files").textContent = files || "No files here.";
    const step = (label, target) => {
      const button = element("button", { type: "button", textContent: label });
      button.addEventListener("click", () => go(target));
      return element("li", {}, button);
    };
    const up = data.parent ? [step("‹ up", data.parent)] : [];
    dialog.querySelector(".folders").replaceChildren(...up, ...data.folders.map((name) => step(name, `${here}/${name}`)));
  };
  await go(start || ".");
  return (await ask(dialog)) === "choose" ? inside : "";
}
