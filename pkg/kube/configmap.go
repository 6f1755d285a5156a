package kube

import (
	"context"
	"path"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// ConfigMap is one key of a ConfigMap. It never writes other keys, and uses only the size of their
// values. Its fields are set once; any goroutine may use it.
type ConfigMap struct {
	client               *Client
	namespace, name, key string
	binary               bool // the key is in binaryData: its value may be any bytes
}

// Content is the value of the key at one resource version.
type Content struct {
	Text    string
	Others  int    // total size in bytes of the values of all other keys
	Version string // the resource version; "": there was no such ConfigMap
}

// ConfigMap returns one key of a ConfigMap. Neither needs to exist.
func (c *Client) ConfigMap(namespace, name, key string) *ConfigMap {
	return &ConfigMap{c, namespace, name, key, false}
}

// BinaryConfigMap is like ConfigMap, for a key whose value may be any bytes.
func (c *Client) BinaryConfigMap(namespace, name, key string) *ConfigMap {
	return &ConfigMap{c, namespace, name, key, true}
}

// String returns the ConfigMap as "configmap NAMESPACE/NAME".
func (m *ConfigMap) String() string { return "configmap " + m.namespace + "/" + m.name }

// configMap holds the fields of a ConfigMap (k8s.io/api/core/v1) that this package uses.
type configMap struct {
	object
	Data       map[string]string `json:"data,omitempty"`
	BinaryData map[string][]byte `json:"binaryData,omitempty"`
}

// Load reads the key. A missing ConfigMap or a missing key is no error.
func (m *ConfigMap) Load(ctx context.Context) (Content, error) {
	var cm configMap
	err := m.client.objects.get(ctx, path.Join(configMaps(m.namespace), m.name), &cm)
	if apierrors.IsNotFound(err) {
		return Content{}, nil
	}
	if err != nil {
		return Content{}, err
	}
	now := Content{Text: cm.Data[m.key], Version: cm.Metadata.ResourceVersion}
	if m.binary {
		now.Text = string(cm.BinaryData[m.key])
	}
	for _, value := range cm.Data {
		now.Others += len(value)
	}
	for _, value := range cm.BinaryData {
		now.Others += len(value)
	}
	now.Others -= len(now.Text)
	return now, nil
}

// Save sets the key's value to text if the ConfigMap still has the version of old. If old
// has no version, Save creates the ConfigMap. It returns the new content.
func (m *ConfigMap) Save(ctx context.Context, old Content, text string) (Content, error) {
	write := configMap{object: named(m.namespace, m.name, old.Version)}
	if m.binary {
		write.BinaryData = map[string][]byte{m.key: []byte(text)}
	} else {
		write.Data = map[string]string{m.key: text}
	}
	var err error
	var now object
	if old.Version == "" {
		err = m.client.objects.create(ctx, configMaps(m.namespace), write, &now)
	} else {
		err = m.client.objects.patch(ctx, path.Join(configMaps(m.namespace), m.name), write, &now)
	}
	if err != nil {
		return Content{}, err
	}
	return Content{Text: text, Others: old.Others, Version: now.Metadata.ResourceVersion}, nil
}

// Follow calls changed with the current version of the ConfigMap and with each new version until
// ctx is done; "" means that there is no ConfigMap. It may skip versions, and it may call
// changed with a version that Save has returned. It calls report with the outcome of each
// request: nil, or why the request failed.
func (m *ConfigMap) Follow(ctx context.Context, changed func(version string), report func(error)) {
	m.client.follow(ctx, schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, m.namespace,
		metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", m.name).String()},
		versionStore(changed), report)
}

// versionStore is the store of a reflector. It passes on only the version.
type versionStore func(version string)

func (s versionStore) Add(o any) error    { s(version(o)); return nil }
func (s versionStore) Update(o any) error { s(version(o)); return nil }
func (s versionStore) Delete(any) error   { s(""); return nil }
func (s versionStore) Resync() error      { return nil }

func (s versionStore) Replace(all []any, _ string) error {
	if len(all) == 0 {
		s("")
	}
	for _, o := range all {
		s(version(o))
	}
	return nil
}

// version returns the resource version of an object.
func version(o any) string {
	if m, ok := o.(metav1.Object); ok {
		return m.GetResourceVersion()
	}
	return ""
}
