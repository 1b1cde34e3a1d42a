// The page: composes requests, runs them one after the other, compares the two lanes.

import { mistake } from "./fields.js";
import { Lane } from "./lane.js";
import { ApiError, problem, streamed } from "./stream.js";

const EXAMPLES = {
  completion: [
    "def fib(n):",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self):',
    "import json\n\ndef load_config(path):",
  ],
  chat: ["Return the largest item of a list.", "A class for a bank account.", "Read all lines of a file."],
};
/** A text that the draft proposes well: few rounds, also where the machine is too slow for speed. */
const PRESET = {
  prompt: EXAMPLES.completion[1],
  temperature: "0",
  "max-tokens": "96",
  seed: "1",
  mode: "speculative",
};
const HINTS = { completion: "Text to continue", chat: "Message" };
const REASONS = {
  stop: "Ended: the model ended the text.",
  length: "Ended: the maximum number of tokens is reached.",
};
const $ = (id) => document.getElementById(id);

const template = $("lane");
const lanes = { ssd: new Lane($("lane-ssd"), template), ar: new Lane($("lane-ar"), template) };
let kind = "completion";
let model = "";
let turns = [];
let running = null;

function setKind(name) {
  kind = name;
  for (const each of ["completion", "chat"]) {
    const tab = $(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
  }
  $("panel").setAttribute("aria-labelledby", `tab-${name}`);
  $("prompt-label").textContent = HINTS[name];
  $("examples").replaceChildren(
    ...EXAMPLES[name].map((text) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text.split("\n")[0];
      button.addEventListener("click", () => {
        $("prompt").value = text;
        $("prompt").focus();
      });
      return button;
    }),
  );
  $("preset").hidden = name !== "completion";
  $("prompt").value = name === "completion" ? EXAMPLES.completion[0] : "";
  showTurns();
}

function setPreset() {
  for (const [name, value] of Object.entries(PRESET)) $(name).value = value;
  $("temperature-shown").textContent = PRESET.temperature;
  $("compare").checked = true;
  run();
}

function showTurns() {
  const list = $("turns");
  list.hidden = kind !== "chat" || !turns.length;
  $("clear").hidden = list.hidden;
  list.replaceChildren(
    ...turns.map(({ role, content }) => {
      const item = document.createElement("li");
      item.className = role;
      item.textContent = content;
      return item;
    }),
  );
  list.scrollTop = list.scrollHeight;
}

/** Return path and body of the request, without its mode. */
function composed(prompt, seed) {
  const shared = {
    model,
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    // Both lanes need the same seed.
    seed: seed ? Number(seed) : Math.floor(Math.random() * 2 ** 48),
    report_rounds: true,
  };
  if (kind === "completion") return ["/v1/completions", { ...shared, prompt }];
  const messages = [...turns, { role: "user", content: prompt }];
  return ["/v1/chat/completions", { ...shared, messages }];
}

/** Run one request in a lane; return whether its text is complete. */
async function runLane(lane, path, body, mode, prompt) {
  lane.reset(prompt);
  lane.section.setAttribute("aria-busy", "true");
  try {
    const options = { key: $("key").value, signal: running.signal };
    for await (const object of streamed(path, { ...body, mode }, options)) {
      const choice = object.choices[0];
      if (!choice) continue;
      lane.add(choice.delta?.content ?? choice.text ?? "", object.ssd);
      if (choice.finish_reason) lane.end(REASONS[choice.finish_reason] ?? choice.finish_reason);
    }
    return true;
  } catch (error) {
    lane.end(error.name === "AbortError" ? "Stopped." : "Failed.");
    throw error;
  } finally {
    lane.section.removeAttribute("aria-busy");
  }
}

async function run() {
  if (running) return;
  const prompt = $("prompt").value;
  const seed = $("seed").value.trim();
  const wrong = mistake(prompt, seed);
  $("error").textContent = wrong;
  $("error").hidden = !wrong;
  if (wrong) return;
  const [path, body] = composed(prompt, seed);
  const compares = $("compare").checked;
  const mode = $("mode").value;
  const shown = kind === "completion" ? prompt : "";
  running = new AbortController();
  setRunning(true);
  $("lane-ar").hidden = !compares;
  $("lanes").classList.toggle("single", !compares);
  lanes.ar.reset(shown);
  try {
    await runLane(lanes.ssd, path, body, mode, shown);
    if (kind === "chat") {
      turns = [...body.messages, { role: "assistant", content: lanes.ssd.content }];
      $("prompt").value = "";
      showTurns();
    }
    // One after the other: together, each would slow the other down.
    if (compares) {
      await runLane(lanes.ar, path, body, "autoregressive", shown);
      showVerdict(mode);
    }
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    running = null;
    setRunning(false);
  }
}

function setRunning(isRunning) {
  $("run").disabled = isRunning;
  $("stop").disabled = !isRunning;
  // The answer belongs to the kind of its request.
  for (const each of ["completion", "chat"]) $(`tab-${each}`).disabled = isRunning;
  if (isRunning) $("verdict").hidden = true;
}

function showVerdict(mode) {
  const { ssd, ar } = lanes;
  if (!ssd.speed || !ar.speed) return;
  const ratio = document.createElement("b");
  const times = (ssd.speed / ar.speed).toFixed(2);
  ratio.textContent = `${times}×`;
  const isForced = Number(times) < 1 && mode !== "auto";
  const isSame = ssd.content === ar.content;
  $("verdict").replaceChildren(
    ratio,
    ` the speed of plain decoding · ${ssd.rounds.length} rounds instead of ${ar.rounds.length} · `,
    isSame ? "identical text ✓" : "the texts differ",
    // The other choices of "Draft" speculate in any case.
    isForced ? ". Slower here: with “server chooses”, the server turns the draft off when it measures this." : "",
  );
  $("verdict").hidden = false;
}

function showError(error) {
  if (error instanceof ApiError && error.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
  const isNetwork = !(error instanceof ApiError);
  $("error").textContent = isNetwork ? `The gateway cannot be reached: ${error.message}` : error.message;
  $("error").hidden = false;
}

async function showModel() {
  const headers = $("key").value ? { authorization: `Bearer ${$("key").value}` } : {};
  const line = $("model");
  try {
    const response = await fetch("/v1/models", { headers });
    if (!response.ok) throw await problem(response);
    const [first] = (await response.json()).data;
    model = first.id;
    line.textContent = `${first.id} · up to ${first.max_model_len} tokens`;
    line.className = "model ready";
  } catch (error) {
    line.textContent = error.message;
    line.className = "model lost";
    if (error.status === 401) $("key-field").hidden = false;
  }
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("preset").addEventListener("click", setPreset);
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  turns = [];
  showTurns();
  $("prompt").focus();
});
$("temperature").addEventListener("input", () => {
  $("temperature-shown").textContent = $("temperature").value;
});
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  showModel();
});
$("theme").addEventListener("click", () => {
  const current = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(current) + 1) % THEMES.length]);
});
for (const name of ["completion", "chat"]) {
  $(`tab-${name}`).addEventListener("click", () => setKind(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "completion" : "chat";
    setKind(other);
    $(`tab-${other}`).focus();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});

setTheme(localStorage.getItem("theme") ?? "auto");
setKind("completion");
$("base").textContent = `${location.origin}/v1`;
showModel();
setInterval(showModel, 10000);
