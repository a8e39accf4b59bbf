// The search runs in a worker. Browsers start none from a file, so there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = this.scope.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        this.scope.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
