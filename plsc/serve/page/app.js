// The page of a plsc service: search, compare, gallery, and how busy it is. No library, no build step.

const $ = (id) => document.getElementById(id);
const make = (tag, kind, text) => {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text; // names are text, never markup
  return node;
};
let model = null;

// ---- talking to the service

async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const token = sessionStorage.getItem("plsc-token");
  if (token) headers.set("Authorization", `Bearer ${token}`);
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("the service cannot be reached");
  }
  if (answer.status === 401) {
    $("token-form").hidden = false;
    $("token").focus();
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Error(problem.detail || `the service answered ${answer.status}`);
  }
  return answer;
}

const askJson = async (path, options) => (await ask(path, options)).json();

function form(...files) {
  const body = new FormData();
  for (const file of files) body.append("image", file);
  return { method: "POST", body };
}

function tell(error) {
  $("message").textContent = error ? String(error.message || error) : "";
  $("message").hidden = !error;
}

async function attempt(work) {
  try {
    tell(null);
    return await work();
  } catch (error) {
    tell(error);
    return undefined;
  }
}

const asked = { search: 0, compare: 0 };

// What work gives, or undefined: something newer of its kind was asked for meanwhile, or it failed, which clears and is said.
async function newest(kind, work, clear) {
  const number = ++asked[kind];
  try {
    tell(null);
    const found = await work();
    return number === asked[kind] ? found : undefined;
  } catch (error) {
    if (number !== asked[kind]) return undefined;
    clear();
    tell(error);
    return undefined;
  }
}

// ---- places to drop an image; pasting goes to the one that waits for it

const drops = new Map();

function dropPlace(id, words, changed) {
  const place = $(id);
  const input = make("input");
  Object.assign(input, { type: "file", accept: "image/jpeg,image/png,image/webp,image/bmp" });
  input.setAttribute("aria-label", words);
  const text = make("div", "", words);
  text.append(make("small", "", "drop, paste or choose"));
  place.append(text, input);
  let shown = null;
  const self = {
    file: null,
    clear() {
      self.file = null;
      input.value = "";
      place.querySelector("img")?.remove();
      text.hidden = false;
      place.classList.remove("filled");
    },
    take(file) {
      if (!file) return;
      self.clear();
      if (shown) URL.revokeObjectURL(shown);
      if (!file.type.startsWith("image/")) {
        changed(); // what was found for another image goes
        return tell(`${file.name || "that"} is not an image`);
      }
      self.file = file;
      shown = URL.createObjectURL(file);
      const image = make("img");
      Object.assign(image, { src: shown, alt: file.name || "pasted image" });
      text.hidden = true;
      place.prepend(image);
      place.classList.add("filled");
      changed();
    },
  };
  input.addEventListener("change", () => self.take(input.files[0]));
  for (const event of ["dragenter", "dragover"]) {
    place.addEventListener(event, (e) => { e.preventDefault(); place.classList.add("over"); });
  }
  for (const event of ["dragleave", "drop"]) place.addEventListener(event, () => place.classList.remove("over"));
  place.addEventListener("drop", (e) => { e.preventDefault(); self.take(e.dataTransfer.files[0]); });
  drops.set(id, self);
  return self;
}

window.addEventListener("dragover", (e) => e.preventDefault());
window.addEventListener("drop", (e) => e.preventDefault()); // beside a place: not opened in the tab
window.addEventListener("paste", (e) => {
  const file = [...(e.clipboardData?.files || [])].find((one) => one.type.startsWith("image/"));
  if (!file) return;
  e.preventDefault();
  const visible = [...drops.entries()].filter(([id]) => $(id).offsetParent !== null).map(([, place]) => place);
  (visible.find((place) => !place.file) || visible[visible.length - 1])?.take(file);
});

// ---- cards of classes and entries

const pictures = new Map(); // small, and asked for again and again

async function picture(path) {
  if (!pictures.has(path)) {
    pictures.set(path, ask(path).then((answer) => answer.blob()).then((blob) => URL.createObjectURL(blob)));
    pictures.get(path).catch(() => pictures.delete(path));
  }
  return pictures.get(path);
}

function initials(name) {
  const words = (name || "").replace(/^.*[/\\]/, "").split(/[\s_.-]+/).filter(Boolean);
  return words.slice(0, 2).map((word) => [...word][0].toUpperCase()).join("") || "?";
}

function card(name, thumbnail) {
  const item = make("li");
  const frame = make("div", "picture", initials(name));
  const text = make("div", "text");
  const label = make("div", "name", name);
  label.title = name;
  text.append(label);
  item.append(frame, text);
  if (thumbnail) {
    picture(thumbnail).then((source) => {
      const image = make("img");
      Object.assign(image, { src: source, alt: "" });
      frame.replaceChildren(image);
    }).catch(() => {});
  }
  return item;
}

function nothing(list, words) {
  list.replaceChildren(make("li", "empty", words));
}

// ---- search

function clearSearch(words) {
  nothing($("results"), words);
  for (const id of ["search-time", "worth"]) $(id).textContent = "";
}

async function search() {
  const file = drops.get("drop-search").file;
  const among = $("among").value;
  const start = performance.now();
  const found = await newest("search", async () => {
    const answer = file && await askJson(`/v1/search?k=${$("count").value}&among=${among}`, form(file));
    if (file && among === "gallery") model = await askJson("/v1/model"); // others add to the gallery as well
    return answer;
  }, () => clearSearch("No result: see above."));
  if (found === null) clearSearch("The nearest classes of an image appear here.");
  if (!found) return;
  $("search-time").textContent = `answered in ${Math.round(performance.now() - start)} ms`;
  const limit = strictest();
  const cards = found.results[0].map((near) => {
    const item = card(near.name ?? `class ${near.id}`, near.thumbnail);
    const above = limit !== null && near.score >= limit.threshold;
    item.classList.toggle("above", above);
    const score = make("div", "score");
    score.append(make("b", "", near.score.toFixed(3)), make("span", "", above ? "above 1:1" : ""));
    const bar = make("div", "bar");
    const inside = make("i");
    inside.style.width = `${Math.max(0, near.score) * 100}%`;
    bar.append(inside);
    item.lastChild.append(score, bar);
    return item;
  });
  if (cards.length) $("results").replaceChildren(...cards);
  else nothing($("results"), "The gallery is empty.");
  $("worth").textContent = cards.length ? worth(limit, among) : "";
}

const oneIn = (rate) => `1 in ${Math.round(1 / rate).toLocaleString("en")}`;
const strictest = () => model.thresholds.reduce((best, one) => (best && best.far <= one.far ? best : one), null);

// A threshold is measured on pairs. Among many, someone is above it by chance: how many is said, and nobody is a match.
function worth(limit, among) {
  if (!limit) return "No threshold was measured: the scores say what is nearest, not whether it is the same.";
  const total = among === "gallery" ? model.gallery.entries : model.num_classes;
  const chance = total * limit.far;
  const about = (chance < 10 ? Number(chance.toPrecision(1)) : Math.round(chance)).toLocaleString("en", {
    maximumSignificantDigits: 3,
  });
  return `"above 1:1": the score reaches ${limit.threshold.toFixed(3)}, which ${oneIn(limit.far)} pairs of different `
    + `ones reach. That is no match: among ${total.toLocaleString("en")} ${among === "gallery" ? "entries" : "classes"} `
    + `about ${about} reach it by chance, for an image of none of them.`;
}

// ---- compare

function clearVerdict(word, words) {
  $("verdict").parentElement.classList.remove("same", "other");
  $("verdict").textContent = word;
  $("score").textContent = words;
  $("scale").hidden = true;
}

async function compare() {
  const [first, second] = ["drop-first", "drop-second"].map((id) => drops.get(id).file);
  const far = $("far").value;
  const found = await newest(
    "compare",
    async () => first && second && askJson(`/v1/verify${far ? `?far=${far}` : ""}`, form(first, second)),
    () => clearVerdict("No result", "see above"),
  );
  if (found === null) clearVerdict("Two images", "drop, paste or choose them");
  if (!found) return;
  const box = $("verdict").parentElement;
  box.classList.toggle("same", found.same === true);
  box.classList.toggle("other", found.same === false);
  $("verdict").textContent = found.same === null ? found.score.toFixed(3) : found.same ? "The same" : "Different";
  $("score").textContent = found.threshold === null
    ? "cosine; no threshold was measured"
    : `cosine ${found.score.toFixed(3)}, threshold ${found.threshold.toFixed(3)}`;
  $("scale").hidden = false;
  $("needle").style.left = `${(found.score + 1) * 50}%`;
  $("limit").hidden = found.threshold === null;
  if (found.threshold !== null) $("limit").style.left = `${(found.threshold + 1) * 50}%`;
}

// ---- gallery

const PAGE = 60;
let offset = 0;

async function listGallery() {
  if (!model.gallery) {
    nothing($("entries"), "This service was started without a gallery (plsc-serve BUNDLE --gallery FOLDER).");
    return;
  }
  await attempt(async () => {
    const query = new URLSearchParams({ offset, limit: PAGE, text: $("filter").value });
    const found = await askJson(`/v1/gallery?${query}`);
    const last = Math.min(offset + PAGE, found.total);
    $("gallery-count").textContent = found.total ? `${offset + 1} to ${last} of ${found.total}` : "none";
    $("previous").disabled = offset === 0;
    $("next").disabled = last >= found.total;
    const cards = found.entries.map((entry) => {
      const item = card(entry.name, entry.thumbnail);
      if (found.writable) {
        const remove = make("button", "remove", "×");
        remove.title = `Remove ${entry.name}`;
        remove.setAttribute("aria-label", remove.title);
        remove.addEventListener("click", async () => {
          if (!confirm(`Remove ${entry.name} from the gallery?`)) return;
          await attempt(() => ask(`/v1/gallery/${encodeURIComponent(entry.id)}`, { method: "DELETE" }));
          listGallery();
        });
        item.append(remove);
      }
      return item;
    });
    if (cards.length) $("entries").replaceChildren(...cards);
    else nothing($("entries"), $("filter").value ? "No name contains that." : "Nobody is in the gallery yet.");
  });
}

async function addEntry(event) {
  event.preventDefault();
  const place = drops.get("drop-add");
  await attempt(async () => {
    await ask(`/v1/gallery?${new URLSearchParams({ name: $("add-name").value })}`, form(place.file));
    place.clear();
    $("add-name").value = "";
    $("add-button").disabled = true;
    await listGallery();
  });
}

// ---- how busy it is

const rates = [];
let before = null;

function parseMetrics(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    const found = line.match(/^([a-z_]+)(?:\{.*\})? (\S+)$/);
    if (found) sums[found[1]] = (sums[found[1]] || 0) + Number(found[2]);
  }
  return sums;
}

async function watch() {
  if ($("service").hidden || document.hidden) return;
  const now = parseMetrics(await (await ask("/metrics")).text());
  now.at = performance.now() / 1000;
  if (before) {
    const seconds = now.at - before.at;
    const rate = (name) => ((now[name] || 0) - (before[name] || 0)) / seconds;
    if (seconds > 1) rates.push(rate("plsc_images_total")); // over less it would be a matter of chance
    if (rates.length > 60) rates.shift();
    const batches = rate("plsc_batch_images_count");
    const shown = {
      "Images a second": rate("plsc_images_total").toFixed(1),
      "Requests a second": rate("plsc_requests_total").toFixed(1),
      "Images a batch": batches ? (rate("plsc_batch_images_sum") / batches).toFixed(1) : "–",
      "Waiting": now.plsc_queue_images,
      "Images so far": now.plsc_images_total || 0,
      "Processor cores busy": rate("process_cpu_seconds_total").toFixed(2),
      "Memory": `${(now.process_resident_memory_bytes / 2 ** 20).toFixed(0)} MiB`,
      "Gallery": now.plsc_gallery_entries,
    };
    $("numbers").replaceChildren(...Object.entries(shown).map(([name, value]) => {
      const box = make("div");
      box.append(make("dt", "", name), make("dd", "", String(value)));
      return box;
    }));
    drawChart();
  }
  before = now;
}

function drawChart() {
  const canvas = $("chart");
  const [width, height, ratio] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio];
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const most = Math.max(1, ...rates);
  const at = (i) => [width - (rates.length - 1 - i) * (width / 59), height - 22 - (rates[i] / most) * (height - 44)];
  pen.strokeStyle = style.getPropertyValue("--line");
  pen.beginPath();
  for (const y of [22, height - 22]) { pen.moveTo(0, y); pen.lineTo(width, y); }
  pen.stroke();
  pen.strokeStyle = style.getPropertyValue("--accent");
  pen.lineWidth = 2;
  pen.beginPath();
  rates.forEach((_, i) => pen.lineTo(...at(i)));
  pen.stroke();
  pen.fillStyle = style.getPropertyValue("--quiet");
  pen.font = "12px system-ui, sans-serif";
  pen.fillText(most.toFixed(most < 10 ? 1 : 0), 0, 16);
  pen.fillText("0", 0, height - 6);
}

// ---- the frame around it all

const tabs = [...document.querySelectorAll('[role="tab"]')];

function show(tab, { focus = false } = {}) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  tell(null);
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`); // setting the hash would move the focus
  if (!model) return;
  if (tab.id === "tab-gallery") listGallery();
  if (tab.id === "tab-service") { before = null; attempt(watch).then(() => setTimeout(() => attempt(watch), 400)); }
}

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (step) show(tabs[(i + step + tabs.length) % tabs.length], { focus: true });
    if (e.key === "Home") show(tabs[0], { focus: true });
    if (e.key === "End") show(tabs[tabs.length - 1], { focus: true });
  });
});

const wished = () => document.documentElement.dataset.theme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

function showTheme() {
  $("theme").textContent = wished() === "dark" ? "☀" : "☾";
}

$("theme").addEventListener("click", () => {
  const chosen = wished() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  localStorage.setItem("plsc-theme", chosen);
  showTheme();
});

function cells(kind, values) {
  const row = make("tr");
  row.append(...values.map((value) => make(kind, "", value)));
  return row;
}

function describe() {
  document.title = `${model.name} · plsc`;
  $("model-name").textContent = model.name;
  const width = `${model.image_size} × ${model.image_size}${model.channels === 1 ? ", grey" : ""}`;
  $("model-facts").textContent =
    `${model.num_classes.toLocaleString("en")} classes · ${width} · embeddings of ${model.embedding_size}`;
  $("digest").textContent = `plsc ${model.plsc_version} · model ${model.model_digest.slice(0, 12)}`;
  $("links").hidden = sessionStorage.getItem("plsc-token") !== null; // a link brings no token along
  $("add-form").hidden = !model.gallery?.writable;
  $("among").querySelector('[value="gallery"]').disabled = !model.gallery;
  $("far-label").hidden = model.thresholds.length === 0;
  $("far").replaceChildren(...model.thresholds.map((one) => {
    const option = make("option", "", oneIn(one.far));
    option.value = one.far;
    option.selected = one.far === model.default_far;
    return option;
  }));
  const rows = model.thresholds.map((one) => cells("td", [
    oneIn(one.far), one.threshold.toFixed(4), `${(one.tar * 100).toFixed(2)} %`,
  ]));
  if (rows.length) {
    $("thresholds").replaceChildren(cells("th", ["False accepts", "Cosine from", "True accepts"]), ...rows);
  } else {
    $("thresholds").replaceChildren(cells("td", ["None was measured: the run had no verification pairs."]));
  }
  search(); // of the image that is there, if any
}

async function begin() {
  await attempt(async () => {
    model = await askJson("/v1/model");
    $("token-form").hidden = true;
    describe();
    show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) || tabs[0]);
  });
}

if (localStorage.getItem("plsc-theme")) document.documentElement.dataset.theme = localStorage.getItem("plsc-theme");
showTheme();
dropPlace("drop-search", "An image to search for", search);
dropPlace("drop-first", "First image", compare);
dropPlace("drop-second", "Second image", compare);
dropPlace("drop-add", "Image", () => { $("add-button").disabled = !drops.get("drop-add").file; });
for (const id of ["among", "count"]) $(id).addEventListener("change", search);
$("far").addEventListener("change", compare);
$("filter").addEventListener("input", () => { offset = 0; listGallery(); });
$("previous").addEventListener("click", () => { offset = Math.max(0, offset - PAGE); listGallery(); });
$("next").addEventListener("click", () => { offset += PAGE; listGallery(); });
$("add-form").addEventListener("submit", addEntry);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("plsc-token", $("token").value);
  begin();
});
setInterval(() => { if (model) watch().catch(() => {}); }, 2000);
begin();
