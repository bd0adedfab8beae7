// The rubric form: rows come and go, and each weight is shown as its share of the reward while it is typed.

const rows = document.getElementById("rows");
if (rows) {
  const bar = document.getElementById("weights");
  const add = document.getElementById("add-row");

  const shares = () => {
    const all = [...rows.querySelectorAll(".criterion")];
    const weights = all.map((row) => Math.max(0, Number(row.querySelector("[name=weight]").value) || 0));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    const pieces = all.map((row, index) => {
      const share = total ? weights[index] / total : 0;
      row.querySelector(".share").textContent = total ? `${(100 * share).toFixed(0)} %` : "—";
      const piece = document.createElement("span");
      piece.textContent = row.querySelector("[name=key]").value;
      piece.style.flexGrow = String(share);
      piece.style.flexBasis = "0";
      return share ? piece : null;
    });
    bar.hidden = !total;
    bar.replaceChildren(...pieces.filter(Boolean));
    for (const button of rows.querySelectorAll("[data-remove]")) button.hidden = all.length < 2;
  };

  add.hidden = false;
  add.addEventListener("click", () => {
    const row = rows.querySelector(".criterion").cloneNode(true);
    for (const input of row.querySelectorAll("input")) input.value = input.name === "weight" ? "1" : "";
    for (const error of row.querySelectorAll(".error")) error.remove();
    rows.append(row);
    row.querySelector("input").focus();
    shares();
  });
  rows.addEventListener("click", (event) => {
    const button = event.target.closest("[data-remove]");
    if (!button) return;
    button.closest(".criterion").remove();
    add.focus();
    shares();
  });
  rows.addEventListener("input", shares);
  shares();
}
