// The run page: charts that move, and progress.

import { live } from "./app.js";
import { ChartBoard } from "./charts.js";
import { coalesced } from "./live.js";

const MOVING = ["metrics.recorded", "step.changed", "evaluation.changed", "version.changed", "run.changed", "transfer.changed"];

const root = document.getElementById("charts");
if (root) {
  const board = new ChartBoard(root);
  const note = document.getElementById("charts-note");
  const load = async () => {
    if (document.hidden && board.data.size) return;
    const response = await fetch(root.dataset.series);
    if (!response.ok) {
      note.textContent = "The charts could not be read just now; they are asked for again with the next change.";
      return;
    }
    note.textContent = "";
    board.update((await response.json()).charts);
  };
  const reload = coalesced(load, 1000);
  live?.addEventListener("event", (event) => {
    if (MOVING.includes(event.detail.type)) reload();
  });
  live?.addEventListener("refresh", reload);
  document.addEventListener("visibilitychange", reload);
  load();
}
