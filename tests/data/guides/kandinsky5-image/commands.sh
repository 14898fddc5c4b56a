python --version
apt -y install python3.13 python3.13-venv
pip install 'simpletuner[cuda]'
pip install 'simpletuner[cuda13]'
simpletuner server
simpletuner configure
cp config/config.json.example config/config.json
mkdir -p datasets/my_images
wandb login
huggingface-cli login
simpletuner train
./train.sh
