// The address that "hetnode status --dashboard" prints has the token behind its #, which browsers do not send.
document.getElementById("live").hidden = true;

function signIn() {
  const token = decodeURIComponent(location.hash.slice(1));
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  document.getElementById("token").value = token;
  document.getElementById("login").submit();
}

// A link that is pasted into a tab with this page loads nothing anew.
addEventListener("hashchange", signIn);
signIn();
