// How to take part in the run.
import { card, el } from "./dom.js";

/** What the operator publishes of the run; null where nothing is published. */
export const published = async () => {
  if (!document.documentElement.dataset.published) return null;
  const answer = await fetch("/.well-known/hetnode.json").catch(() => null);
  return answer?.ok ? answer.json() : null;
};

/** How to join: an open run by this address where `hetnode join` takes it, else with an invite, which of an open run is for everyone. */
export function takePart(offer) {
  const isHere = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  const given = offer?.invite || "INVITE";
  const isFound = offer?.invite && (location.protocol === "https:" || isHere);
  const told = offer?.invite ? "Anyone may join. What a newcomer sends counts after some good rounds."
    : `An invite is needed: ${offer ? offer.contact : "ask the operator."}`;
  return card("Take part", el("div", { class: "pad" }, el("p", {}, told),
    el("p", {}, el("code", {}, `hetnode join ${isFound ? `${location.origin}/` : given}`)),
    el("p", {}, "In a container: ", el("code", {}, `docker run --volume hetnode:/home/hetnode hetnode join ${isFound && !isHere ? `${location.origin}/` : given}`))));
}
