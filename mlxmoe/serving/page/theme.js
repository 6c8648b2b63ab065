// The theme that was chosen, before the first paint; main.js lets the user change it.
try {
  const theme = localStorage.getItem("mlxmoe.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: as the system.
}
