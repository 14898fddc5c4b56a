python --version
pip install 'simpletuner[cuda]'
pip install 'simpletuner[cuda13]'
simpletuner server
simpletuner configure
cp config/config.json.example config/config.json
mkdir -p datasets/videos
wandb login
huggingface-cli login
simpletuner train
pip install simpletuner[cuda]
