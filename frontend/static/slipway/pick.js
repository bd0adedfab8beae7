// Choosing two runs to compare. The table may be replaced at any time, so nothing is held on to.

function picked() {
  return [...document.querySelectorAll("#compare input[name=pick]:checked")].map((box) => box.value);
}

function update() {
  const button = document.getElementById("compare-go");
  if (!button) return;
  const count = picked().length;
  button.disabled = count !== 2;
  document.getElementById("compare-note").textContent =
    count > 2 ? "Choose two, not more." : count === 2 ? "" : "Choose two runs to see what differs.";
}

document.addEventListener("change", update);
document.addEventListener("submit", (event) => {
  if (event.target.id !== "compare") return;
  event.preventDefault();
  const [second, first] = picked(); // the list is newest first: compare the older with the newer
  if (second && first) location.assign(`${event.target.action}?a=${first}&b=${second}`);
});
update();
