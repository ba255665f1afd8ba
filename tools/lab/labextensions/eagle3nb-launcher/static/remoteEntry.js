// A prebuilt JupyterLab extension, written by hand so that nothing has to be built or installed: what a bundler would
// emit for one plugin. Lab loads this file, hands its own modules to `init` and asks `get` for the plugin.
(() => {
  let modules;  // {package: {version: {get}}}; Lab's own come first
  const shared = async name => (await Object.values(modules[name])[0].get())();

  const badge = text =>
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 52 52"><circle cx="26" cy="26" r="24" fill="#0072B2"/>` +
    `<text x="26" y="36" font-size="28" font-family="sans-serif" text-anchor="middle" fill="#ffffff">${text}</text></svg>`;

  const plugin = async () => {
    const { ILauncher } = await shared("@jupyterlab/launcher");
    const { LabIcon } = await shared("@jupyterlab/ui-components");
    const add = (app, launcher, rank, sign, label, caption, execute) => {
      const command = `eagle3nb:${rank}`;
      const icon = new LabIcon({ name: command, svgstr: badge(sign) });
      app.commands.addCommand(command, { label, caption, icon, execute });
      launcher.add({ command, category: "eagle3nb", rank });
    };
    const fill = async (app, launcher) => {
      const folder = await app.serviceManager.contents.get("notebooks");
      const names = folder.content.map(file => file.name).filter(name => /^\d+_.*\.ipynb$/.test(name)).sort();
      names.forEach((name, rank) => {
        const [number, stage] = name.replace(".ipynb", "").split(/_(.*)/);
        const open = () => app.commands.execute("docmanager:open", { path: `notebooks/${name}` });
        add(app, launcher, rank, number, stage, `Open notebooks/${name}; run it with Run, Run All Cells`, open);
      });
      const runs = async () => {
        const there = await app.serviceManager.contents.get("outputs/index.html", { content: false }).catch(() => null);
        const page = there ? "outputs/index.html" : "outputs/specimen-demo/index.html";  // before the first run
        window.open(`${app.serviceManager.serverSettings.baseUrl}files/${page}`, "_blank");
      };
      add(app, launcher, names.length, "≡", "runs", "All runs and their records, in a tab of the browser", runs);
    };
    return {
      id: "eagle3nb-launcher:plugin",
      description: "The notebooks in the launcher, and the table of contents open at first.",
      autoStart: true,
      requires: [ILauncher],
      activate: async (app, launcher) => {
        void app.shell.restored.then(layout => {
          if (layout && layout.fresh) app.shell.activateById("table-of-contents");
        });
        await fill(app, launcher);
      },
    };
  };

  (globalThis._JUPYTERLAB ??= {})["eagle3nb-launcher"] = {
    init: scope => { modules = scope; },
    get: async () => { const made = { __esModule: true, default: await plugin() }; return () => made; },
  };
})();
