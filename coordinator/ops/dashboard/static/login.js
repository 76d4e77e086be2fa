// What everybody may know of a published run, and the way in for readers with a token.
import { published, takePart } from "./join.js";

// The address that "hetnode status --dashboard" prints has the token behind its #, which browsers do not send.
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

const offer = await published();
if (offer) document.getElementById("join").append(takePart(offer));
