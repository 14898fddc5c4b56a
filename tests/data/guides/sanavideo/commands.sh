--enable_group_offload \
--group_offload_type block_level \
--group_offload_blocks_per_group 1 \
--group_offload_use_stream \
# --group_offload_to_disk_path /fast-ssd/simpletuner-offload
python --version
apt -y install python3.13 python3.13-venv
apt -y install nvidia-cuda-toolkit
pip install 'simpletuner[cuda]'
pip install 'simpletuner[cuda13]'
simpletuner configure
cp config/config.json.example config/config.json
mkdir -p datasets
pushd datasets
huggingface-cli download --repo-type=dataset sayakpaul/video-dataset-disney-organized --local-dir=disney-black-and-white
popd
wandb login
huggingface-cli login
simpletuner train
./train.sh
