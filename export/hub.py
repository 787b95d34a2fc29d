"""`export --push-to-hub`: a proven export, and nothing else, to a model repository of the Hugging Face hub."""

import json
from pathlib import Path

from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import say

# What a server and a reader need; the run's own records stay here.
_UPLOADED = ("config.json", "model.safetensors", "README.md", "verification.json", "acceptance.png")


def push_to_hub(folder: Path, repo: str, force: bool = False) -> str:
    """Upload an export in one commit; the repository is made, private, where it is not there.

    Args:
        folder: an export.
        repo: owner/name.
        force: upload although a server has not confirmed it.

    Returns:
        The commit's address.

    Raises:
        UserError: it is not proven on a server, or there are no credentials.
        StageFailed: the hub refused.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    file = folder / "verification.json"
    proof = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"passed": None, "served": "not run"}
    if not (proof["passed"] and proof["served"] == "checked") and not force:
        raise UserError(
            f"{folder} is not proven on a server (passed: {json.dumps(proof['passed'])}; served: {proof['served']}).",
            "Export it with export.verify=true where vLLM is installed, or add --force.",
        )
    api = HfApi()
    try:
        api.create_repo(repo, repo_type="model", private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(_UPLOADED),
            commit_message="EAGLE3 draft, exported by draftsmith",
        )
    except (LocalTokenNotFoundError, HFValidationError) as error:
        raise UserError(
            f"--push-to-hub {repo}: {error}.", "Log in with `hf auth login`, and give owner/name."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise StageFailed(f"{repo} was not uploaded ({reason}); the export itself is in {folder}.") from None
    say(f"uploaded: {commit.commit_url}")
    return str(commit.commit_url)
