// The view "advice": what slows the run or keeps it from learning, with the figure and the settings that change it.
"use strict";

function drawAdvice(state) {
  const text = (name, content, kind) => {
    const element = document.createElement(name);
    element.textContent = content;
    if (kind) element.className = kind;
    return element;
  };
  const found = state.advice.map((advice) => {
    const box = text("article", "", "advice");
    const keys = text("p", "Settings: ");
    advice.keys.forEach((key, index) => keys.append(index ? ", " : "", text("code", key)));
    box.append(text("h2", `${advice.name}, since step ${advice.since}`), text("p", advice.figure, "figure"), text("p", advice.meaning), keys);
    return box;
  });
  const none = state.now.step ? "Nothing was found." : "No step has ended yet.";
  const more = "Each rule looks at the newest 10 steps. It says nothing before it has enough of them, and enough groups or samples.";
  document.getElementById("advice").replaceChildren(...(found.length ? found : [text("p", none)]), text("p", more, "faint"));
}
