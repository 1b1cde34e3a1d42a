"""The SSDDeployment and the SSDDraftPool: their typed form, their schemas, their validation."""
