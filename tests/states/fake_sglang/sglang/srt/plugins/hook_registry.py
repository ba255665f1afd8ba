from types import SimpleNamespace

HookType = SimpleNamespace(AROUND="around")
registered = []


class HookRegistry:
    @staticmethod
    def register(target, hook, kind):
        registered.append((target, hook, kind))
