"""What code means, as one number: it stays when comments, docstrings or formatting change, or when a function moves.

The fingerprint of a study is the SHA-256 of all that its runs use: of the functions that it starts from (its roots), of
every function, class and constant of this repository that these name, and so on; see `syntax` for the form in which
they count. A class counts with all its methods, and a module that is used other than by `module.name` with all it
holds. Where a thing stands and what it is called there doesn't count: things refer to each other by numbers. Of other
libraries counts what is used, by its full name. A JSON file that lies beside a source and is named in it counts by what
it holds.

Sources are read as they lie in a folder, and nothing is imported. So what a program finds by a name in a string is not
seen.
"""

import hashlib
from pathlib import Path

from experiments.syntax import Form, Module

ROOT = Path(__file__).parents[1]
PACKAGES = ("mgpu_lib", "experiments")
VIRTUAL = "mgpu_lib.virtual"
# The parts of virtual GPUs that set times, where no study names them: the machine comes to them by itself.
CLOCK = tuple(
    f"{VIRTUAL}.{name}" for name in ("clock.Clock", "streams.Stream", "patches.comm", "communicator", "collectives")
)
# The parts that imitate PyTorch. What they do to times is seen by tests that model some of the recorded steps anew.
IMITATION = tuple(f"{VIRTUAL}.{name}" for name in ("machine", "dispatch", "tensor", "gpu", "patches"))


def of_training(*roots):
    """The fingerprint of what trains: for it virtual GPUs are hardware."""
    return of(roots, stop=(VIRTUAL,))


def of_times(*roots):
    """The fingerprint of what models times."""
    return of((*roots, *CLOCK), stop=IMITATION)


def of(roots, stop=()):
    """SHA-256 of all that `roots` use, as 64 hexadecimal digits.

    roots    full names, such as "experiments.critical.record"; that of a module means all it holds
    stop     full names of modules, with all in them, and of functions: where one is named, its name alone counts
    Raises ValueError, naming it, for a name that isn't there, for a star import and for a relative one.
    """
    code = Code(ROOT, stop)
    for root in roots:
        code.number(code.find(root))
    return hashlib.sha256("\n".join(code.forms()).encode()).hexdigest()


class Code:
    """The packages in a folder, and what of them has been reached: {(module, name): its number}.

    The name None stands for all that a module holds.
    """

    def __init__(self, folder, stop):
        self.folder, self.stop, self.modules, self.reached = folder, stop, {}, {}

    def module(self, name):
        """The Module of this full name, or None."""
        if name not in self.modules:
            path = self.folder.joinpath(*name.split("."))
            there = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
            self.modules[name] = Module(name, there[0]) if there and name.split(".")[0] in PACKAGES else None
        return self.modules[name]

    def find(self, name):
        """(module, name in it) of a root."""
        target, rest = self.follow(name.split("."), "", ())
        if rest or isinstance(target, str):
            raise ValueError(f"{name} is no module, nor a function, class or constant of one, in {self.folder}")
        return target

    def follow(self, names, module, stop):
        """What `names`, joined by dots, mean in `module`: (what is found, the names left over: attributes of it).

        Found is (module, name), or text for what counts by its name alone.
        """
        home = module  # what a module says of its own isn't stopped
        while names:
            (first, *rest), here = names, self.module(module)
            below = f"{module}.{first}" if module else first
            elsewhere = here.imports.get(first, below) if here else below
            if not here or (first not in here.bindings and elsewhere == below and self.module(below)):
                if not self.module(below):
                    return ".".join(names), []
                module, names = below, rest
            elif module != home and any(f"{below}.".startswith(f"{each}.") for each in stop):
                return first, rest
            elif first in here.bindings:
                return (module, first), rest
            elif elsewhere != below:
                return self.follow([*elsewhere.split("."), *rest], "", stop)
            else:
                raise ValueError(f"{below} is not in {self.folder}: it can't be told what it does")
        return (module, None), []

    def number(self, target):
        return self.reached.setdefault(target, len(self.reached))

    def meaning(self, names, module):
        """The same as text. What is found has been reached, and is named by its number."""
        target, rest = self.follow(names, module, self.stop)
        return ".".join([target if isinstance(target, str) else f"#{self.number(target)}", *rest])

    def forms(self):
        """The forms of all that has been reached. More is reached meanwhile; its forms follow."""
        found, seen = [], set()
        for target in self.growing():
            module, name = target
            form = Form(self.module(module), self.meaning)
            if name is None:
                found.append(str([(each, self.number((module, each))) for each in form.module.bindings]))
            else:
                found.append(" ".join(map(form.definition, form.module.bindings[name])))
            if module not in seen:
                seen.add(module)
                found += map(form.of, form.module.effects)
        return found

    def growing(self):
        """What has been reached, also what is added while one goes through it."""
        done = 0
        while done < len(self.reached):
            yield list(self.reached)[done]
            done += 1
