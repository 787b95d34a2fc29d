"""The shipped configs, their JSON schema and the DeepSpeed settings, as data of the package."""
