"""Training a draft: prompts -> answers by the target -> features -> anchors -> loss -> checkpoint."""
