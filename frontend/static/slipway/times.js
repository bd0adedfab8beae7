// Relative times that stay true while the page is open. templatetags/slipway.py says the same on the server.

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function agoText(moment, now = Date.now()) {
  const passed = (now - moment) / 1000;
  if (passed < 5) return "just now";
  for (const [size, unit] of UNITS) if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  return "just now";
}

export function refreshTimes(root = document) {
  for (const element of root.querySelectorAll("time[data-ago]")) {
    element.textContent = agoText(Date.parse(element.dateTime));
  }
}

export function startTimes() {
  setInterval(refreshTimes, 10000);
}
