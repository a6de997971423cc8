"""The extras of a request: what goes into its chunk keys besides model, tokens and images. These are the adapter's
digest, the weights epoch and cache_salt.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvferry.digests import digest_of_files, signature_of
from kvferry.identity import lora_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

_ADAPTER_FILES = (".safetensors", ".bin", ".pt")


@dataclass
class _Adapter:
    path: str
    signature: str  # the files' signatures when the digest was taken
    digest: str | None  # None: the content that the worker has loaded is unknown
    # True if the adapter was loaded again from changed files or from another path: vLLM's prefix cache may have blocks
    # that were computed with the old files.
    is_reloaded: bool


class RequestExtras:
    """Makes the text of the extras: the adapter's digest, the weights epoch and cache_salt.

    `requires_salt`: True if KV of requests without cache_salt is not shared. `numbers_images`: see numbers_images().

    `weights_epoch`: number of completed resets of the cache since the start. `is_reset_due`: True if the last reset
    left blocks in vLLM's prefix cache. `num_reloads`: number of times that an adapter was loaded again from changed
    files or from another path.
    """

    def __init__(self, lora_settings: str = "", update_group: str = "", requires_salt: bool = False,
                 numbers_images: bool = False) -> None:
        self._lora_settings = lora_settings  # see identity.lora_settings()
        self._update_group = update_group
        self._requires_salt = requires_salt
        self._numbers_images = numbers_images
        self.weights_epoch = 0
        self.is_reset_due = False
        self.num_reloads = 0
        self._adapters: dict[int, _Adapter] = {}  # keyed by vLLM's number of the adapter

    def of(self, request: "Request", num_local_tokens: int = 0) -> str | None:
        """Returns the extras; None if the request's KV must not be shared.

        KV must not be shared while a reset is due, if the content of the request's adapter or images is unknown, or if
        the request lacks a salt that is required. It must not be shared either if vLLM's prefix cache has KV for
        `num_local_tokens` of the request's tokens that may have been computed before the adapter was reloaded.
        """
        if self.is_reset_due or self.lacks_salt(request) or (self._numbers_images and request.mm_features):
            return None
        if request.lora_request is None and not self.weights_epoch and not request.cache_salt:
            return ""  # a shortcut for requests without extras: the code below would return the same
        parts = []
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request)
            if adapter is None or adapter.digest is None or (adapter.is_reloaded and num_local_tokens > 0):
                return None
            parts.append(f"lora={adapter.digest}{self._lora_settings}")
        if self.weights_epoch:
            parts.append(f"epoch={self.epoch_name}")
        if request.cache_salt:
            parts.append(f"salt={request.cache_salt}")
        return ";".join(parts)

    def lacks_salt(self, request: "Request") -> bool:
        return self._requires_salt and not request.cache_salt

    @property
    def epoch_name(self) -> str:
        """The weights epoch as text: the number of completed resets, and the update group if the number is not 0."""
        # Without a reset, the weights are those of the fingerprint.
        grouped = self._update_group and self.weights_epoch
        return f"{self.weights_epoch}@{self._update_group}" if grouped else str(self.weights_epoch)

    def _adapter(self, lora: Any) -> _Adapter | None:
        """Returns the adapter with a digest of its files as the worker has read them; None if the files can't be read.

        vLLM reads the files when it first sees the adapter's number, and again if it has evicted the adapter or if a
        request says `load_inplace`. If the files change in between, this process can't know which content the worker
        has. Returns None also for a request that names a path from before a reload.
        """
        known = self._adapters.get(lora.lora_int_id)
        try:
            files = _files_of(lora.lora_path)
            signature = ";".join(f"{file.name} {signature_of(file)}" for file in files)
            is_as_loaded = known is not None and (known.path, known.signature) == (lora.lora_path, signature)
            if known is None or (lora.load_inplace and not is_as_loaded):
                self.num_reloads += known is not None
                known = _Adapter(lora.lora_path, signature, _digest(lora, files), known is not None)
                self._adapters[lora.lora_int_id] = known
                return known
        except OSError:  # the files can't be read, for example because they are being replaced
            return None
        if known.path != lora.lora_path:  # the request came before the adapter was reloaded from another path
            return None
        if known.digest is not None and not is_as_loaded:
            known.digest = None
            logger.warning(
                "kvferry: KV of adapter %s is not shared any more: its files in %s changed after they were loaded; "
                "load it again with load_inplace, or under another name", lora.lora_name, lora.lora_path,
            )  # fmt: skip
        return known


def make_extras(vllm_config: "VllmConfig", config: dict[str, Any]) -> RequestExtras:
    """Returns the RequestExtras of this server. `config` has the settings in effect."""
    return RequestExtras(lora_settings(vllm_config), config["update_group"], config["require_cache_salt"],
                         numbers_images(vllm_config))  # fmt: skip


def numbers_images(vllm_config: "VllmConfig") -> bool:
    """Returns True if vLLM numbers the images of each process instead of hashing them, as it does if it caches neither
    images nor KV. Then different images in different processes can have the same identifier.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if not multimodal or multimodal.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching:
        return False
    logger.warning(
        "kvferry: KV of requests with images or other media is not shared, because vLLM does not hash media without "
        "prefix caching and with --mm-processor-cache-gb 0; set --enable-prefix-caching or a size above 0"
    )
    return True


def _digest(lora: Any, files: list[Path]) -> str | None:
    if files:
        return ("3d:" if lora.is_3d_lora_weight else "") + digest_of_files(files, f"adapter {lora.lora_name}")
    logger.warning(
        "kvferry: KV of adapter %s is not shared: %s lacks adapter_config.json or weights on this host, so the "
        "adapter's content is unknown", lora.lora_name, lora.lora_path,
    )  # fmt: skip
    return None


def _files_of(path: str) -> list[Path]:
    """Returns the adapter's configuration and weights; an empty list if one of them is missing."""
    try:
        folder = Path(path).expanduser()
        found = [Path(entry.path) for entry in os.scandir(folder) if entry.is_file()]
    except (OSError, RuntimeError):  # the folder can't be read, or the home directory is unknown
        found = _files_in_hub_cache(path)
    weights = [file for file in found if file.suffix in _ADAPTER_FILES]
    config = [file for file in found if file.name == "adapter_config.json"]
    return sorted(weights + config) if weights and config else []


def _files_in_hub_cache(name: str) -> list[Path]:
    if name.startswith(("/", "~", ".")) or name.count("/") != 1:
        return []
    try:
        from huggingface_hub import snapshot_download

        return [file for file in Path(snapshot_download(name, local_files_only=True)).iterdir() if file.is_file()]
    except Exception:  # the hub raises many types of error; each leaves the adapter's content unknown
        return []
