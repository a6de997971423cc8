"""Says why the native module, kvferry._core, can't be loaded."""

import re
import subprocess

# Debian names a package after its library and the version (libzmq.so.5: libzmq5), except for these libraries.
_PACKAGES = {"libcrypto": "libssl"}


def why_not_loaded(error: ImportError) -> str:
    """Returns one sentence with the shared libraries that this host lacks and the Debian packages that contain them. If
    no library is found missing, the sentence has the error instead.
    """
    missing = _missing_libraries(error)
    if not missing:
        return f"kvferry's native module can't be loaded: {error}"
    packages = " ".join(dict.fromkeys(package_of(library) for library in missing))
    return (f"kvferry's native module can't be loaded, because this host has no {', '.join(missing)}; "
            f"on Debian: apt-get install {packages}")  # fmt: skip


def package_of(library: str) -> str:
    """Returns Debian's package of a library such as libzmq.so.5."""
    name, _, version = library.partition(".so.")
    name = _PACKAGES.get(name, name).replace("_", "-")
    return f"{name}{'-' if name[-1].isdigit() else ''}{version}"


def _missing_libraries(error: ImportError) -> list[str]:
    """Returns the shared libraries that the module needs and this host lacks. If ldd lists none, returns the one
    library that `error` names, or an empty list if it names none.
    """
    try:
        listed = subprocess.run(["ldd", error.path or ""], capture_output=True, text=True, timeout=10, check=False)
        missing = re.findall(r"(\S+) => not found", listed.stdout)
    except (OSError, subprocess.TimeoutExpired):
        missing = []
    first = re.match(r"(\S+): cannot open shared object file", str(error))
    return list(dict.fromkeys(missing)) or ([first[1]] if first else [])
