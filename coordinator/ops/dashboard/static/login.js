// The address that "hetnode status --dashboard" prints has the token behind its #, which browsers do not send.
const token = decodeURIComponent(location.hash.slice(1));
document.getElementById("live").hidden = true;
if (token) {
  history.replaceState(null, "", location.pathname);
  const form = document.getElementById("login");
  document.getElementById("token").value = token;
  form.submit();
}
