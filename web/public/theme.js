// Before the first paint: the theme that was chosen, so that nothing flashes.
try {
  const chosen = localStorage.getItem("holdfast.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is closed to this page: the system's theme stands.
}
