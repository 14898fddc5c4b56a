// Paints the mask of a file over its picture. Tinted areas are not learned; the mask is white elsewhere.
import { api, element, page, sentences } from "./common.js";

const LONGEST = 1024, SHORTEST = 128; // pixels of the sides, as on the server
const STRETCH = 0.02; // maximum relative difference between the aspect ratios of a mask and its file
const MOST_UNDONE = 20, STEP = 0.5; // of the radius of the brush, for each arrow key
const TINT = "#c8143c";
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
let isUnsaved = false;
addEventListener("beforeunload", (event) => isUnsaved && event.preventDefault());

// Opens the painter for the file of a card. `body` names the file; `saved` receives the server's response.
export async function paint(card, body, saved) {
  document.head.querySelector("[href$='mask.css']") ?? document.head.append(element("link", { rel: "stylesheet", href: "/static/mask.css" }));
  const dialog = document.importNode(page("#library .painting").content, true).firstElementChild, find = (selector) => dialog.querySelector(selector);
  const { picture, mask, size } = card.querySelector(".paint").dataset, canvas = find("canvas"), brush = find(".brush"), crop = find(".crop");
  const context = canvas.getContext("2d", { willReadFrequently: true }), undone = [], place = { x: 0, y: 0 };
  let { tag } = card.querySelector(".paint").dataset, isFresh = true;
  const radius = () => Math.max(1, (find("[type=range]").value / 200) * Math.min(canvas.width, canvas.height));
  const refuse = (text) => { find("[role=alert]").textContent = text; };

  function showBrush() {
    const width = (200 * radius()) / canvas.width;
    brush.style.cssText = `left:${(100 * place.x) / canvas.width}%;top:${(100 * place.y) / canvas.height}%;width:${width}%`;
    brush.hidden = false;
  }

  // The learned share of the trained crop.
  function share() {
    const [left, top, width, height] = crop.hidden ? [0, 0, 100, 100] : ["left", "top", "width", "height"].map((side) => parseFloat(crop.style[side]));
    const area = [left * canvas.width, top * canvas.height, width * canvas.width, height * canvas.height].map((part) => Math.round(part / 100));
    const { data } = context.getImageData(area[0], area[1], Math.max(1, area[2]), Math.max(1, area[3]));
    let tinted = 0;
    for (let index = 3; index < data.length; index += 4) tinted += data[index];
    return 1 - tinted / 255 / (data.length / 4);
  }

  function tell() {
    const learned = share(), percent = Number((100 * learned).toPrecision(3));
    find("#painter-share").textContent = isFresh ? "Nothing is painted yet, so all of the picture is learned." : `${percent} % of the trained crop is learned.`;
    find("[value=undo]").disabled = !undone.length;
    find("[value=save]").disabled = isFresh || !learned;
    refuse(!isFresh && !learned ? "An empty mask cannot be saved. To learn nothing from a file, leave it out." : "");
  }

  // Makes an undoable change of the mask.
  function change(act) {
    undone.push([context.getImageData(0, 0, canvas.width, canvas.height), isFresh]);
    if (undone.length > MOST_UNDONE) undone.shift();
    act();
    [isUnsaved, isFresh] = [true, false];
    tell();
  }

  function undo() {
    const [before, wasFresh] = undone.pop() ?? [];
    if (!before) return;
    context.putImageData(before, 0, 0);
    isFresh = wasFresh;
    isUnsaved = undone.length > 0;
    tell();
  }

  function line(to) {
    context.globalCompositeOperation = find("[value=erase]").checked ? "source-over" : "destination-out";
    Object.assign(context, { strokeStyle: TINT, lineCap: "round", lineWidth: 2 * radius() });
    context.beginPath();
    context.moveTo(place.x, place.y);
    Object.assign(place, to);
    context.lineTo(place.x + 0.01, place.y); // some browsers draw no line of zero length
    context.stroke();
    showBrush();
  }

  // The first stroke: what is painted is learned, the rest is not; what is erased is not learned, the rest is.
  function stroke() {
    if (isFresh) tint(!find("[value=erase]").checked);
    line(place);
  }

  function tint(isTinted) {
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = TINT;
    if (isTinted) context.fillRect(0, 0, canvas.width, canvas.height);
  }

  // Loads a picture of a mask; returns whether it has pixels that are not white.
  function take(image) {
    tint(true);
    context.fillStyle = "#000"; // behind transparent pixels
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height), { data } = pixels, colour = [1, 3, 5].map((at) => parseInt(TINT.slice(at, at + 2), 16));
    let isPartial = false;
    for (let index = 0; index < data.length; index += 4) {
      const grey = Math.round(0.299 * data[index] + 0.587 * data[index + 1] + 0.114 * data[index + 2]);
      data.set([...colour, 255 - grey], index);
      isPartial ||= grey < 255;
    }
    context.putImageData(pixels, 0, 0);
    return isPartial;
  }

  async function choose({ target }) {
    const [file] = target.files, image = await createImageBitmap(file).catch(() => null);
    target.value = ""; // so that the same file can be chosen again
    if (!image) return refuse(`${file.name} is not a picture that this browser can show.`);
    const ratio = (image.width * canvas.height) / (image.height * canvas.width);
    if (Math.abs(ratio - 1) > STRETCH) return refuse(`${file.name} is ${image.width}x${image.height}: its aspect ratio differs from the picture's.`);
    change(() => take(image));
  }

  // White where the picture is not tinted, else black.
  function asFile() {
    const sheet = element("canvas", { width: canvas.width, height: canvas.height }), grey = sheet.getContext("2d");
    grey.drawImage(canvas, 0, 0);
    grey.globalCompositeOperation = "source-in";
    grey.fillRect(0, 0, sheet.width, sheet.height);
    grey.globalCompositeOperation = "destination-over";
    grey.fillStyle = "#fff";
    grey.fillRect(0, 0, sheet.width, sheet.height);
    return sheet.toDataURL("image/png");
  }

  async function save() {
    find("[value=save]").disabled = true;
    const answer = await api("/api/library/mask", { method: "PUT", etag: tag || undefined, body: { ...body, mask: asFile() } });
    find("[value=save]").disabled = false;
    if (answer.status === 412) {
      const box = element("template", { innerHTML: answer.data.card });
      tag = box.content.querySelector(".paint")?.dataset.tag; // saving again replaces it
    }
    if (!answer.ok) return refuse(`Not saved: ${sentences(answer).join(" ")}${answer.status === 412 ? " Save again to replace it." : ""}`);
    isUnsaved = false;
    dialog.close();
    saved(answer.data);
  }

  function leave(event) {
    if (isUnsaved && find("[value=close]").textContent === "Close") {
      event.preventDefault();
      find("[value=close]").textContent = "Close without saving";
      return refuse("The mask has not been saved.");
    }
    isUnsaved = false;
    dialog.close();
  }

  const ACTS = { undo, save, close: leave, whole: () => change(() => tint(false)), none: () => change(() => tint(true)) };
  const point = ({ offsetX, offsetY }) => ({ x: (offsetX * canvas.width) / canvas.clientWidth, y: (offsetY * canvas.height) / canvas.clientHeight });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    Object.assign(place, point(event));
    change(stroke);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons) return line(point(event));
    Object.assign(place, point(event));
    showBrush();
  });
  canvas.addEventListener("pointerup", tell);
  canvas.addEventListener("focus", showBrush);
  dialog.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "z") undo();
    else if (event.target === canvas && event.key === " ") change(stroke);
    else if (event.target === canvas && ARROWS[event.key]) {
      const [x, y] = ARROWS[event.key].map((step) => step * Math.max(1, STEP * radius()));
      Object.assign(place, { x: Math.min(canvas.width, Math.max(0, place.x + x)), y: Math.min(canvas.height, Math.max(0, place.y + y)) });
      showBrush();
    } else return;
    event.preventDefault();
  });
  dialog.addEventListener("click", (event) => ACTS[event.target.value]?.(event));
  dialog.addEventListener("cancel", leave);
  dialog.addEventListener("close", () => { dialog.remove(); card.querySelector(".paint")?.focus(); });
  find("[type=range]").addEventListener("input", showBrush);
  find("[type=file]").addEventListener("change", choose);

  find("#painter-title").textContent = `Mask of ${card.querySelector("b").textContent}`;
  find(".of-clip").hidden = !card.querySelector("video");
  find("img").src = picture;
  await find("img").decode();
  const sides = size.split("x").map(Number);
  const scale = Math.min(1, Math.max(LONGEST / Math.max(...sides), SHORTEST / Math.min(...sides)));
  [canvas.width, canvas.height] = sides.map((side) => Math.round(side * scale));
  Object.assign(place, { x: canvas.width / 2, y: canvas.height / 2 });
  find(".easel").style.setProperty("--ratio", sides[0] / sides[1]);
  const box = card.querySelector(".box");
  crop.hidden = !box;
  if (box) crop.style.cssText = box.style.cssText;
  if (mask) {
    const image = Object.assign(new Image(), { src: mask });
    await image.decode();
    isFresh = !take(image); // a white mask may have been created automatically
  }
  if (isFresh) tint(false);
  page("#library").append(dialog);
  dialog.showModal();
  tell();
}
