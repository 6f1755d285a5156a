package kube

import (
	"context"
	"path"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// ConfigMap is one key of a ConfigMap. The others are never read or written by it.
type ConfigMap struct {
	client               *Client
	namespace, name, key string
}

// Content is what the key held at one time.
type Content struct {
	Text    string
	Others  int    // bytes of the values of all other keys
	Version string // "" when there was no such ConfigMap
}

// ConfigMap returns a key of a ConfigMap that need not exist.
func (c *Client) ConfigMap(namespace, name, key string) *ConfigMap {
	return &ConfigMap{c, namespace, name, key}
}

// String returns how kubectl would be told of it.
func (m *ConfigMap) String() string { return "configmap " + m.namespace + "/" + m.name }

// configMap is the object, as far as we look (k8s.io/api/core/v1).
type configMap struct {
	object
	Data       map[string]string `json:"data,omitempty"`
	BinaryData map[string][]byte `json:"binaryData,omitempty"`
}

// Load reads the key. That there is no such ConfigMap, or no such key, is no error.
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
	for key, value := range cm.Data {
		if key != m.key {
			now.Others += len(value)
		}
	}
	for _, value := range cm.BinaryData {
		now.Others += len(value)
	}
	return now, nil
}

// Save makes text the key's value, if the ConfigMap is still as old says; it creates
// one that was not there. It returns what is now there.
func (m *ConfigMap) Save(ctx context.Context, old Content, text string) (Content, error) {
	write := configMap{object: named(m.namespace, m.name, old.Version), Data: map[string]string{m.key: text}}
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

// Follow calls changed with each version that the ConfigMap gets from now on, "" when
// it is deleted, until ctx is done. It may skip versions, and it may call changed with
// one that Save has returned. said gets what stands in its way, nil when nothing does.
func (m *ConfigMap) Follow(ctx context.Context, changed func(version string), said func(error)) {
	m.client.follow(ctx, schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, m.namespace,
		metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", m.name).String()},
		versionStore(changed), said)
}

// versionStore is what a reflector writes to when only the version counts.
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

func version(o any) string {
	if m, ok := o.(metav1.Object); ok {
		return m.GetResourceVersion()
	}
	return ""
}
