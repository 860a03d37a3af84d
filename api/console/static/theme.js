// Before anything is drawn: the colours that were chosen here, else those of the system.
{
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  document.documentElement.dataset.script = "yes";
}
