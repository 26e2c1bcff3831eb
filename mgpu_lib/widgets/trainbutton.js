// The Train button: asks Python to train, shows how far it is, and says what came out. Only where Python listens.

import { BATCH_NORM, cellOf, many, netName, netOf, percents } from "./cells.js";
import { button, html } from "./figure.js";

export const same = (run, at) =>
  run?.state && Object.entries(at).every(([key, value]) => run[key] === value || key === "num_gpus");

function timeLeft(left) {
  const whole = Math.max(1, Math.round(left));
  if (whole < 100) return `${many(whole, "second")} left`;
  return whole < 6000 ? `${Math.round(whole / 60)} minutes left` : `${(whole / 3600).toFixed(1)} hours left`;
}

// What a run that has ended, or that goes on, has found.
function runWords(data, run) {
  if (!run?.state) return "";
  const where = `${netName(data, run)} at batch ${run.batch_size}, learning rate ${run.lr}`;
  if (run.state === "failed") return `Training stopped: ${run.words}`;
  if (!run.steps) return run.state === "running" ? "Loading the data." : "Cancelled.";
  const what = `${where} on ${run.gpus}, with ${run.data}`;
  const other = run.same ? "" : " These are other images than the recorded ones: compare the shapes, not the numbers.";
  const norm =
    run.num_gpus > 1 && netName(data, run).endsWith(BATCH_NORM)
      ? " Each GPU normalizes with its own images, so this is not quite the run of one GPU."
      : "";
  const last = run.marks.length
    ? `accuracy ${percents(run.accuracy.at(-1))} after ${many(run.marks.at(-1), "step")}`
    : "";
  if (run.state === "running") return `Training ${what}.${norm}${other}`;
  if (run.state === "cancelled") return `Cancelled: ${what}${last ? `: ${last}` : ""}.`;
  if (run.diverged) return `Diverged within ${many(run.diverged, "step")}: ${what}.${norm}${other}`;
  return `Trained: ${what}: ${last}${against(data, run)}.${norm}${other}`;
}

// Against the recorded seeds of the same cell.
function against(data, run) {
  if (!run.same) return "";
  const { finals } = cellOf(netOf(data, run), run.batch_size, run.lr, run.budget);
  if (!finals.length) return "; the recorded runs diverged";
  return `; recorded: ${percents(finals[0])}${finals.length > 1 ? ` to ${percents(finals.at(-1))}` : ""}`;
}

const views = new WeakMap(); // how many views show the figure with these data

// Returns [element, show, leave]; an empty element on a static page, where nobody listens.
export function trainButton(model, data) {
  const root = html("div", { class: "mgpu-train" });
  if (!model.send) return [root, () => {}, () => {}];
  const [train] = button("Train on this machine", () => model.send({ do: "train" })),
    [cancel] = button("Cancel", () => model.send({ do: "cancel" })),
    bar = html("progress", { "aria-label": "training progress" }),
    left = html("span", { class: "mgpu-left" }),
    said = html("p", { role: "status" });
  cancel.addEventListener("click", () => (left.textContent = "stopping after this step"));
  root.append(html("span", { class: "mgpu-buttons" }, train, cancel, bar, left), said);
  const show = () => {
    const run = model.get("run"),
      running = run?.state === "running";
    cancel.setAttribute("aria-disabled", !running);
    bar.hidden = left.hidden = !running;
    if (running && run.steps) bar.max = run.steps;
    if (!running || !run.steps) {
      bar.removeAttribute("value");
      left.textContent = "";
    }
    const words = runWords(data, run);
    if (said.textContent !== words) said.textContent = words; // or a screen reader says it again
  };
  const progress = ({ step, left: seconds }) => {
    if (step === undefined || model.get("run")?.state !== "running") return;
    bar.value = step;
    left.textContent = `step ${step.toLocaleString("en-US")} of ${bar.max.toLocaleString("en-US")}, ${timeLeft(seconds)}`;
  };
  model.on("msg:custom", progress);
  views.set(data, (views.get(data) ?? 0) + 1);
  const leave = () => {
    model.off("msg:custom", progress);
    views.set(data, views.get(data) - 1);
    const last = views.get(data) === 0; // nobody could cancel any more
    if (last && model.get("run")?.state === "running") model.send({ do: "cancel" });
  };
  return [root, show, leave];
}
