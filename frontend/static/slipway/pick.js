// Choosing two runs to compare.

const form = document.getElementById("compare");
if (form) {
  const button = document.getElementById("compare-go");
  const note = document.getElementById("compare-note");
  const picked = () => [...form.querySelectorAll("input[name=pick]:checked")].map((box) => box.value);
  const update = () => {
    const count = picked().length;
    button.disabled = count !== 2;
    note.textContent = count > 2 ? "Choose two, not more." : count === 2 ? "" : "Choose two runs to see what differs.";
  };
  form.addEventListener("change", update);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const [second, first] = picked(); // the list is newest first: compare the older with the newer
    if (second && first) location.assign(`${form.action}?a=${first}&b=${second}`);
  });
  update();
}
