// Apply the chosen colour theme before the first paint; without a choice, the system's theme applies.
{
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  document.documentElement.dataset.script = "yes";
}
