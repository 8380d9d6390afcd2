"Tiny files in every benchmark's format, all invented, and predictions for them."
import json

NAMES = [f'dev-{i}-0-img{i % 2}' for i in range(8)]
CIRR = [{'pairid': 9000 + i, 'reference': NAMES[i], 'target_hard': NAMES[i + 1], 'target_soft': {NAMES[i + 1]: 1.0, NAMES[i + 2]: -1.0},
         'caption': f'same  animal {i}', 'img_set': {'id': i, 'members': NAMES[:6], 'reference_rank': i, 'target_rank': i + 1}} for i in range(3)]
CIRCO = [{'id': i, 'reference_img_id': 10 + i, 'target_img_id': 20 + i, 'gt_img_ids': [20 + i, 30 + i], 'relative_caption': f'has {i}',
          'shared_concept': 'a bus', 'semantic_aspects': ['negation', 'addition'][:i]} for i in range(3)]
INFO = {'images': [{'id': d + i, 'file_name': 'x.jpg'} for d in (10, 20, 30) for i in range(3)]}
IQ = [{'candidate': 'B01', 'target': 'B02', 'captions': ['is darker.', ' has sleeves']}, {'candidate': 'B01', 'target': 'B03', 'captions': ['', 'is red']}]
OBJECT = [{'reference': {'val_image_id': 1}, 'target': {'val_image_id': 2}, 'condition': 'cup', 'gallery': [{'val_image_id': 3}, {'val_image_id': 2}]}] * 2
BOX = [{'reference': {'image_id': 1, 'instance_bbox': [1, 2, 3, 4]}, 'target': {'image_id': 2, 'instance_bbox': [1, 2, 3.5, 4]}, 'condition': 'red',
        'gallery': [{'image_id': 3, 'instance_bbox': [5, 2, 3, 4]}]}]
LASCO = [{'qid': 1000, 'query-image': [10, 'val2014/a10.jpg'], 'query-text': 'is empty', 'target-image': [20, 'val2014/a20.jpg']}]
QUERY = [{'id': 'q1', 'image': 'q/1.png', 'text': 'make it brick', 'modality': 'image,text', 'metadata': {'subcategory': 'material'}}]
CORPUS = [{'id': f'1_{i}.png', 'image': f'1_{i}.png', 'modality': 'image'} for i in range(3)]
INSTANCE = [{'qid': 'q1', 'pos': ['1_0.png'], 'neg': ['1_1.png']}]
MQUERY = [{'qid': '8:1', 'query_txt': 'Swap it.', 'query_img_path': 'm/r.jpg', 'query_modality': 'image,text', 'query_src_content': '{"id": "r"}',
           'pos_cand_list': ['8:1'], 'neg_cand_list': ['8:2'], 'task_id': 7}]
MPOOL = [{'did': f'8:{i}', 'txt': None, 'img_path': f'm/{n}.jpg', 'modality': 'image', 'src_content': None} for i, n in enumerate('rab')]

FILES = {'cirr': {'captions/cap.rc2.val.json': CIRR, 'image_splits/split.rc2.val.json': {n: f'./dev/{n}.png' for n in NAMES}},
         'circo': {'annotations/val.json': CIRCO, 'COCO2017_unlabeled/annotations/image_info_unlabeled2017.json': INFO},
         'fashioniq': {f'{kind}.{c}.val.json': rows for c in ('dress', 'shirt', 'toptee')
                       for kind, rows in (('captions/cap', IQ), ('image_splits/split', ['B00', 'B01', 'B02', 'B03', f'B-{c}']))},
         'genecis': {'change_object.json': OBJECT, 'focus_attribute.json': BOX},
         'lasco': {'lasco_val.json': LASCO, 'lasco_val_corpus.json': [{'id': i, 'path': f'val/val2014/a{i}.jpg'} for i in (10, 20, 30)]},
         'edir': {'queries.jsonl': QUERY, 'corpus.jsonl': CORPUS, 'instances.jsonl': INSTANCE},
         'mbeir': {'query/test/mbeir_cirr_task7_test.jsonl': MQUERY, 'cand_pool/cirr_task7.jsonl': MPOOL}}
PREDICTIONS = {'cirr': {str(c['pairid']): {'gallery_raw': NAMES[::-1], 'subset_raw': NAMES[:6]} for c in CIRR},
               'circo': {str(i): [20, '31', 12] for i in range(3)},
               'fashioniq': {'gallery': 'original', 'queries': {c: [0, 1] for c in ('dress', 'shirt', 'toptee')},
                             'rankings': {c: [['B02', 'B00'], ['B01']] for c in ('dress', 'shirt', 'toptee')}},
               'genecis': {'change_object': [[.5, .25, .5], [1, 2, 3]], 'focus_attribute': [[1, 0]]},
               'lasco': {'1000': [30, 20]}, 'edir': {'q1': ['1_2.png']}, 'mbeir': {'8:1': ['8:0', '8:1']}}


def write(folder, files):
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = name.endswith('.jsonl') and isinstance(value, list)
        path.write_text(''.join(json.dumps(v) + '\n' for v in value) if lines else json.dumps(value))
    return folder
